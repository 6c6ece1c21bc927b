#!/usr/bin/env bash
# Make the directory of the nvme tier, on the machine's own NVMe disks if it has any: several become a
# RAID 0, a single one is used as it is, without any it is a directory on the root disk.
#
#   kv-nvme.sh [--no-disks | --disk DEVICE ...] [--owner UID:GID] DIRECTORY
#
# Running it again changes nothing. Only EC2 instance-store disks are used automatically, and only empty
# ones: their contents are lost with the instance anyway. Other disks must be named with --disk.
set -euo pipefail

RAID=/dev/md/kv
LABEL=samovar-kv
INSTANCE_STORE='Amazon EC2 NVMe Instance Storage'

fail() { echo "kv-nvme: $*" >&2; exit 1; }

instance_store_disks() {
    lsblk --nodeps --noheadings --paths --raw --output NAME,MODEL |
        sed 's/\\x20/ /g' | awk -v model="$INSTANCE_STORE" 'index($0, model) { print $1 }'
}

# A file system that we made is kept; any other content is foreign and not touched.
format() {
    local device=$1 label
    label=$(blkid --match-tag LABEL --output value "$device" || true)
    if [ "$label" = "$LABEL" ]; then return; fi
    if [ -n "$(blkid --output export "$device" || true)" ]; then
        fail "$device holds something else. Wipe it (wipefs -a $device) or leave it out"
    fi
    mkfs.ext4 -q -F -L "$LABEL" -m 0 -E nodiscard,lazy_itable_init=1 "$device"
}

# Where this disk is already mounted, for example by a service of the image.
mounted_at() { lsblk --noheadings --raw --output MOUNTPOINT "$1" | grep --max-count=1 '^/' || true; }

raid_of() {
    if [ ! -e "$RAID" ]; then
        mdadm --create "$RAID" --run --level=0 --raid-devices="$#" --name=kv "$@" >&2
    fi
    echo "$RAID"
}

disks=() look=yes dir=
while [ $# -gt 0 ]; do
    case $1 in
        --no-disks) look=no ;;
        --disk) [ $# -ge 2 ] || fail "--disk needs a device"; look=no; disks+=("$2"); shift ;;
        --owner) [ $# -ge 2 ] || fail "--owner needs UID:GID"; owner=$2; shift ;;
        -*) fail "there is no option $1" ;;
        *) [ -z "$dir" ] || fail "one directory only, not also $1"; dir=$1 ;;
    esac
    shift
done
[ -n "$dir" ] || fail "which directory? kv-nvme.sh [--no-disks | --disk DEVICE ...] DIRECTORY"
owner=${owner:-$(id -u):$(id -g)}

if [ "$look" = yes ]; then mapfile -t disks < <(instance_store_disks); fi

# Without disks, a directory that we own needs no root: it may be in the user's home.
if [ ${#disks[@]} -eq 0 ] && mkdir -p "$dir" 2>/dev/null && [ -O "$dir" ]; then
    chmod 0700 "$dir"
    echo "kv-nvme: $dir is a directory"
    exit 0
fi

if [ "$(id -u)" -ne 0 ]; then
    named=(); for disk in "${disks[@]}"; do named+=(--disk "$disk"); done
    if [ ${#named[@]} -eq 0 ]; then named=(--no-disks); fi
    exec sudo -n bash "$0" "${named[@]}" --owner "$owner" "$dir"
fi

mkdir -p "$dir"
if [ ${#disks[@]} -gt 0 ] && ! mountpoint -q "$dir"; then
    taken=$(mounted_at "${disks[0]}")
    if [ -n "$taken" ]; then
        mkdir -p "$taken/$LABEL"
        mount --bind "$taken/$LABEL" "$dir"
    else
        device=${disks[0]}
        if [ ${#disks[@]} -gt 1 ]; then device=$(raid_of "${disks[@]}"); fi
        format "$device"
        mount -o noatime,nosuid,nodev "$device" "$dir"
    fi
fi
chown "$owner" "$dir"
chmod 0700 "$dir"
echo "kv-nvme: $dir is ready on ${#disks[@]} disks"
