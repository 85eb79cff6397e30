#!/bin/sh
# node.sh DIR: a user instance of systemd with a bus of its own, as the node of a test. The node sees
# DIR as /run/node. It has its own /tmp, /run and control groups, and every other directory is
# read-only. tests/fleet/node.rs starts this script in new namespaces.
set -eu
refuse() { echo "node.sh: $1; only tests/fleet may run this script" >&2; exit 1; }
[ $$ = 1 ] || refuse "not the first process of a PID namespace"
[ "${PORTCULLIS_NODE-}" = test ] || refuse "not the node of a test"

mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
mkdir /mnt/node
mount --bind "$1" /mnt/node
mount -t tmpfs tmpfs /run
# A user instance starts only where this directory says that the system runs systemd.
mkdir -p /run/node /run/systemd/system
mount --move /mnt/node /run/node
umount /mnt
mount -t tmpfs tmpfs /tmp
mount -t proc proc /proc
umount --lazy /sys
mount -t sysfs -o ro sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
# The root control group of the machine has no type; the root of a namespace has one.
[ -e /sys/fs/cgroup/cgroup.type ] || refuse "the control groups are those of the machine"
mount -o remount,ro,bind /

# systemd may not be the first process: that one is always a system instance. When this shell ends,
# all processes of the node end.
env -i HOME=/run/node/home XDG_RUNTIME_DIR=/run/node/run XDG_CONFIG_HOME=/run/node/config \
    DBUS_SESSION_BUS_ADDRESS=unix:path=/run/node/run/bus PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    SYSTEMD_UNIT_PATH=/run/node/run/systemd/transient:/run/node/config/systemd/user:/run/node/units \
    SYSTEMD_GENERATOR_PATH=/nowhere SYSTEMD_ENVIRONMENT_GENERATOR_PATH=/nowhere \
    /usr/lib/systemd/systemd --user --log-target=console --show-status=0 &
echo $! >/run/node/systemd.pid
wait
