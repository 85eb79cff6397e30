#!/bin/sh
# machine.sh ROOT DIR NAME PROGRAMS: a machine of a test with a systemd of its own, from the root
# directory that rootfs.sh has built. The machine's changes to it are kept in memory until the
# machine ends. The machine sees DIR as /run/node and PROGRAMS as /opt/portcullis.
# tests/fleet/machine.rs starts this script in new namespaces.
set -eu
refuse() { echo "machine.sh: $1; only tests/fleet may run this script" >&2; exit 1; }
[ $$ = 1 ] || refuse "not the first process of a PID namespace"
[ "${PORTCULLIS_NODE-}" = test ] || refuse "not the machine of a test"
root=$1 dir=$2 name=$3 programs=$4

mount --make-rprivate /
mount -t proc proc /proc
umount --lazy /sys
mount -t sysfs -o ro sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
# The root control group of the machine that runs the test has no type; the root of a namespace has
# one.
[ -e /sys/fs/cgroup/cgroup.type ] || refuse "the control groups are not those of a test"

mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root /mnt/node /mnt/programs
mount -t overlay -o "lowerdir=$root,upperdir=/mnt/upper,workdir=/mnt/work" overlay /mnt/root
mount --bind "$dir" /mnt/node
mount --bind "$programs" /mnt/programs
tr -d - </proc/sys/kernel/random/uuid >/mnt/root/etc/machine-id
echo "$name" >/mnt/root/etc/hostname
cp "$dir"/units/* /mnt/root/etc/systemd/system/
# Tests start units more often than systemd permits by default.
mkdir -p /mnt/root/etc/systemd/system.conf.d
printf '[Manager]\nDefaultStartLimitIntervalSec=0\n' >/mnt/root/etc/systemd/system.conf.d/test.conf
# systemd-nspawn keeps its own files here.
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /tmp
mount -o remount,ro,bind /

# The container ends with status 133 when the machine is rebooted.
status=133
while [ "$status" = 133 ]; do
    status=0
    systemd-nspawn --quiet --boot --register=no --keep-unit --link-journal=no --machine="$name" \
        --directory=/mnt/root --network-namespace-path=/proc/self/ns/net --resolv-conf=off \
        --timezone=off --console=pipe --capability=CAP_NET_ADMIN --bind=/mnt/node:/run/node \
        --bind-ro=/mnt/programs:/opt/portcullis </dev/null || status=$?
done
exit "$status"
