#!/bin/sh
# boot.sh BIN REPO: systemd as the first process of a small machine of its own. It sees no unit files but those that are made
# here, writes to nothing but memory, and shares neither /tmp, /run, /var nor /etc with anybody.
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir /run/bin /run/repo /run/units
mount --bind "$1" /run/bin
mount --bind "$2" /run/repo
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /var
mkdir /var/lib /var/tmp
cp -a /etc /run/etc
mount --bind /run/etc /etc
mount -t proc proc /proc
mount -o remount,ro,bind /
for target in sysinit basic shutdown network-online multi-user; do
    printf '[Unit]\nDefaultDependencies=no\n' >"/run/units/$target.target"
done
/run/bin/portcullis install up keeper controller heartbeat machine --directory /run/units
ip link set lo up
exec env -i container=test PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin SYSTEMD_UNIT_PATH=/run/units \
    /usr/lib/systemd/systemd --system --unit=multi-user.target --log-target=null --show-status=0
