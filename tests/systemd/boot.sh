#!/bin/sh
# boot.sh BIN REPO: systemd as the first process of a small machine of its own. It sees no unit files but those that are made
# here, writes to nothing but memory, and shares neither /tmp, /run, /var, /etc, /dev nor control groups with anybody.
set -eu
no() { echo "boot.sh: $1; it is for tests/systemd alone, and would mount over this machine's own directories" >&2; exit 1; }
[ $$ = 1 ] || no "not the first process of a machine"
[ "${PORTCULLIS_BOOT-}" = test ] || no "not inside a test machine"

mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir /run/bin /run/repo /run/units /run/dev
mount --bind "$1" /run/bin
mount --bind "$2" /run/repo
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /var
mkdir /var/lib /var/tmp
cp -a /etc /run/etc
mount --bind /run/etc /etc
# A script of user data writes its unit file to where systemd looks.
mount --bind /run/units /etc/systemd/system
mount -t tmpfs -o mode=755 tmpfs /run/dev
for node in null zero full random urandom tty; do
    : >"/run/dev/$node"
    mount --bind "/dev/$node" "/run/dev/$node"
    mount -o remount,ro,bind "/run/dev/$node"
done
umount --lazy /dev
mount --move /run/dev /dev
mount -t proc proc /proc
mount --bind /proc/sys /proc/sys
# Control groups of the second kind and no others, whatever this machine has: systemd then asks for no more. In a
# namespace, what is mounted is our own group and what is below it; only the group of everybody has no type.
umount --lazy /sys
mount -t sysfs -o ro sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
[ -e /sys/fs/cgroup/cgroup.type ] || no "the control groups are those of everybody"
for place in / /run/bin /run/repo /proc/sys; do
    mount -o remount,ro,bind "$place"
done

for target in sysinit basic shutdown network-online multi-user; do
    printf '[Unit]\nDefaultDependencies=no\n' >"/run/units/$target.target"
done
/run/bin/portcullis install up keeper controller heartbeat machine --provider memory --directory /run/units
ip link set lo up
# The clock and the modules of the kernel are everybody's.
exec env -i container=test PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin SYSTEMD_UNIT_PATH=/run/units \
    setpriv --bounding-set=-sys_time,-sys_module,-sys_rawio \
    /usr/lib/systemd/systemd --system --unit=multi-user.target --log-target=null --show-status=0
