# node.sh DIR: a user instance of systemd with a bus of its own, which sees DIR as /run/node. It ends,
# with all its processes, when the input of this script ends. The demo starts this script in new mount
# and control group namespaces; with `inner` it runs in the namespaces of the node.
set -eu
trap '' INT TERM
if [ "$1" != inner ]; then
    mkdir "$1/groups" "$1/run" "$1/home" "$1/config"
    mount -t cgroup2 cgroup2 "$1/groups"
    group=$1/groups/portcullis-demo-$$
    mkdir "$group"
    # The process enters its group before the control group namespace is created, so that the group
    # is the root of that namespace.
    sh -euc 'echo $$ >"$1/cgroup.procs"
        exec unshare --mount --pid --ipc --cgroup --fork --kill-child=KILL sh -c "$2" sh inner "$3"' \
        sh "$group" "$PORTCULLIS_NODE" "$1" || failed=$?
    find "$group" -depth -type d -exec rmdir {} \;
    exit "${failed-0}"
fi
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
mkdir /mnt/node
mount --bind "$2" /mnt/node
mount -t tmpfs tmpfs /run
# A user instance starts only where this directory says that the system runs systemd.
mkdir -p /run/node /run/systemd/system
mount --move /mnt/node /run/node
umount /mnt
mount -t proc proc /proc
mount -t cgroup2 cgroup2 /sys/fs/cgroup
# systemd may not be the first process: that one is always a system instance.
env -i HOME=/run/node/home XDG_RUNTIME_DIR=/run/node/run XDG_CONFIG_HOME=/run/node/config \
    DBUS_SESSION_BUS_ADDRESS=unix:path=/run/node/run/bus PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    SYSTEMD_UNIT_PATH=/run/node/units SYSTEMD_GENERATOR_PATH=/nowhere \
    SYSTEMD_ENVIRONMENT_GENERATOR_PATH=/nowhere \
    /usr/lib/systemd/systemd --user --log-target=null --show-status=0 </dev/null >/dev/null 2>&1 &
cat >/dev/null
