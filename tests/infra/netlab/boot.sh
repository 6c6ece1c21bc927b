# Run as process 1 of a host, in namespaces of its own: puts its file system together, then reaps orphans.
# Wants DIR (the host's files), SHARED, HOSTS, NAME, BIN, GATEWAY, SHM_BYTES, KEEP (paths below /root,
# separated by ":"), CODE (directories below what a host has of its own, that it must see all the same,
# separated by ":"), and maybe NVME (a disk image for /mnt/kv) and CGROUP (limits of memory).
set -eu
hostname "$NAME"
mkdir -p "$DIR"/{home,tmp,log,etc/upper,etc/work}
chmod 1777 "$DIR/tmp"
chmod 700 "$DIR/home"

mount -t overlay overlay -o "lowerdir=/etc,upperdir=$DIR/etc/upper,workdir=$DIR/etc/work" /etc
mount --bind "$HOSTS" /etc/hosts
echo "$NAME" >/etc/hostname
rm -f /etc/resolv.conf
echo "nameserver $GATEWAY" >/etc/resolv.conf
echo "export PATH=$BIN:\$PATH" >/etc/profile.d/netlab.sh

number=0
IFS=:
for path in $CODE; do
  number=$((number + 1))
  mkdir -p "$DIR/code-$number"
  mount --rbind "$path" "$DIR/code-$number"
done
number=0
for path in $KEEP; do
  number=$((number + 1))
  layers="$DIR/keep-$number"
  mkdir -p "$layers/upper" "$layers/work" "$path" "$DIR/home/${path#/root/}"
  mount -t overlay overlay -o "lowerdir=$path,upperdir=$layers/upper,workdir=$layers/work" \
    "$DIR/home/${path#/root/}"
done
unset IFS
mount --rbind "$DIR/home" /root

mount -t tmpfs -o mode=755,size=64m tmpfs /mnt
mkdir -p /mnt/lab
mount --bind "$SHARED" /mnt/lab
if [ -n "${NVME:-}" ]; then
  mkdir -p /mnt/kv
  mount -o loop "$NVME" /mnt/kv
fi
[ -z "${CGROUP:-}" ] || mount --bind "$CGROUP" /sys/fs/cgroup/memory
mount --bind "$DIR/log" /var/log
mount -t tmpfs -o mode=1777,size="$SHM_BYTES" tmpfs /dev/shm
mount -t tmpfs -o mode=755,size=64m tmpfs /run
mkdir -p /run/lock /run/sshd
mount --bind "$DIR/tmp" /tmp
number=0
IFS=:
for path in $CODE; do
  number=$((number + 1))
  mkdir -p "$path"
  mount --rbind "$DIR/code-$number" "$path"
done
unset IFS
cd /root
echo ready
exec >/dev/null
while :; do
  sleep 3600 &
  wait $! || :
done
