#!/bin/sh
# Becomes systemd, as the first process of a pid namespace, with the units of UNITS, and without the settings and generators of the host.
# Usage: systemd.sh UNITS PROGRAMS LOG TARGET. PROGRAMS is mounted at /usr/local/sbin, LOG is the console.
set -eu
mount --make-rprivate /
mount -t proc proc /proc
# systemd raises limits of the kernel for the whole host.
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount --bind "$2" /usr/local/sbin
mount --bind "$3" /dev/console
mount --bind /etc /etc
mount -t tmpfs -o mode=755 tmpfs /etc/systemd
mkdir /etc/systemd/system
cp "$1"/* /etc/systemd/system/
# A host without machine id stays one.
mount -o remount,bind,ro /etc
generators=/lib/systemd/system-generators
if [ -d $generators ]; then mount -t tmpfs tmpfs $generators; fi
mount -t tmpfs -o mode=755 tmpfs /run
# PrivateTmp= makes directories there.
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /var/tmp
if [ -d /sys/fs/cgroup/systemd ]; then
    # cgroup v1: systemd needs a hierarchy of its own only.
    mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
    mkdir /sys/fs/cgroup/systemd
    mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
else
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
fi
export container=test
exec /lib/systemd/systemd --system --unit="$4" --log-target=console --log-level=notice
