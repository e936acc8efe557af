#!/usr/bin/env bash
# First process of a guest: builds a root of its own out of the host's and becomes systemd.
#
# Runs in fresh mount, pid, network, ipc, uts and cgroup namespaces. The root is an overlay: the
# host's files below, a tmpfs above, so every write is forgotten with the guest. Nothing that is
# mounted here is seen outside.
#   inside.sh STATE [FROM TO]...     directories or files of the host to show at other paths
set -euo pipefail
state=$1
shift

# /proc is still that of the host, so the number there is the host's.
read -r own _ </proc/self/stat
echo "$own" >"$state/pid"

mkdir -p "$state/mnt"
mount -t tmpfs -o mode=755 kvd-guest "$state/mnt"
mkdir "$state"/mnt/{upper,work,root}
root=$state/mnt/root
mount -t overlay -o "lowerdir=/,upperdir=$state/mnt/upper,workdir=$state/mnt/work" kvd-guest "$root"

mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
# systemd raises limits in /proc/sys, and those are the host's: only those of this network are ours.
mount --bind "$root/proc/sys" "$root/proc/sys"
mount --bind "$root/proc/sys/net" "$root/proc/sys/net"
mount -o remount,bind,ro,nosuid,nodev,noexec "$root/proc/sys"
mount -t sysfs -o nosuid,nodev,noexec,ro sysfs "$root/sys"
mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755,nosuid,nodev tmpfs "$root/run"

mount -t tmpfs -o mode=755,nosuid tmpfs "$root/dev"
mkdir "$root"/dev/{pts,shm,mqueue}
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
ln -s fd/0 "$root/dev/stdin"
ln -s fd/1 "$root/dev/stdout"
ln -s fd/2 "$root/dev/stderr"
: >"$root/dev/console"
mount --bind "$state/console" "$root/dev/console"
for one in null zero full random urandom tty fuse; do
  [ -e "/dev/$one" ] || continue
  : >"$root/dev/$one"
  mount --bind "/dev/$one" "$root/dev/$one"
done

# Of the host's units none but what systemd itself needs; and no rule that empties /tmp.
units=$root/etc/systemd/system
rm -rf "$units"/*.wants "$units"/*.requires
ln -sf /dev/null "$root/etc/tmpfiles.d/tmp.conf"
for one in systemd-{udevd,udev-trigger,modules-load,logind,firstboot,random-seed,update-utmp}.service \
  systemd-{hwdb-update,binfmt,sysctl,remount-fs,pstore,networkd,resolved,timesyncd}.service \
  systemd-udevd-{control,kernel}.socket getty.target ldconfig.service \
  {keyboard,console}-setup.service proc-sys-fs-binfmt_misc.automount \
  dev-{hugepages,mqueue}.mount sys-kernel-{debug,tracing,config}.mount \
  sys-fs-fuse-connections.mount; do
  ln -sf /dev/null "$units/$one"
done
cat >"$units/guest.target" <<'UNIT'
[Unit]
Requires=basic.target
After=basic.target
Wants=systemd-journald.service
UNIT
mkdir -p "$root"/etc/systemd/{system,journald}.conf.d
printf '[Journal]\nStorage=volatile\nRateLimitIntervalSec=0\n' >"$root/etc/systemd/journald.conf.d/guest.conf"
printf '[Manager]\nShowStatus=no\nDefaultTimeoutStopSec=10s\n' >"$root/etc/systemd/system.conf.d/guest.conf"
: >"$root/etc/fstab"
rm -rf "$root/var/log/journal" "$root/etc/kvd"

while [ $# -gt 0 ]; do
  mkdir -p "$root$2"
  mount --rbind "$1" "$root$2"
  shift 2
done

ip link set lo up
hostname guest
cd "$root"
mkdir .host
pivot_root . .host
umount -l /.host
rmdir /.host
# systemd leaves this to whoever made the container, and LoadCredential= needs it.
mount --make-rshared /
exec </dev/null >/dev/console 2>&1
exec env -i container=kvd-test LANG=C.UTF-8 TERM=dumb \
  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  /lib/systemd/systemd --system --unit=guest.target --log-target=journal
