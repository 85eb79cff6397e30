#!/bin/sh
# rootfs.sh DIR: builds the root directory of the machines in tests/fleet, unless it exists with the
# same packages. The packages are those of the Debian release that runs on this machine, from the
# archive that apt is configured with. Needs root and debootstrap.
set -eu
dir=$(realpath "$1")
exec 9>"$dir.lock"
flock 9
packages=systemd,systemd-sysv,dbus,libpam-systemd,iproute2,procps,nftables,python3
[ ! -e "$dir" ] || [ "$(cat "$dir.packages" 2>/dev/null)" != "$packages" ] || exit 0

. /etc/os-release
# Prints the first archive with the main packages of this release.
archive() {
    apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
        sed -n "s/^$VERSION_CODENAME main //p" | head -n 1
}
# apt lists an archive only after it has read its index.
[ -n "$(archive)" ] || apt-get update -qq
archive=$(archive)
[ -n "$archive" ] || { echo "rootfs.sh: apt has no archive of $VERSION_CODENAME" >&2; exit 1; }
eval "$(apt-config shell http Acquire::http::Proxy https Acquire::https::Proxy)"
[ -z "${http-}" ] || export http_proxy="$http"
[ -z "${https-}" ] || export https_proxy="$https"

echo "building $dir, which takes a few minutes"
new=$dir.new
rm -rf "$new"
if ! debootstrap --variant=minbase --include="$packages" "$VERSION_CODENAME" "$new" "$archive" \
    >"$dir.log" 2>&1; then
    cat "$dir.log" >&2
    exit 1
fi
# Each machine gets an id of its own. None has a use for timers, a console, or logins.
rm -f "$new/etc/machine-id" "$new/var/lib/dbus/machine-id"
rm -rf "$new"/var/cache/apt/*.bin "$new"/var/cache/apt/archives/*.deb "$new"/var/lib/apt/lists/*
for unit in timers.target console-getty.service systemd-logind.service; do
    ln -sf /dev/null "$new/etc/systemd/system/$unit"
done
rm -rf "$dir"
mv "$new" "$dir"
echo "$packages" >"$dir.packages"
