/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * ioctl commands that write to a file, or attach it to a device that writes to it later. Another thread can change the memory of
 * the caller after it was read here: the command decides what a call may do, its arguments only which file.
 */
#ifndef FDMAP_DEVICE_CALLS_H
#define FDMAP_DEVICE_CALLS_H

#include "file_writes.h"

enum ioctl_effect {
	IOCTL_NONE,
	IOCTL_ALLOCATES, /* like fallocate(0): no content changes */
	IOCTL_WRITES,    /* like fallocate(FALLOC_FL_PUNCH_HOLE) */
	IOCTL_ATTACHES,
};

#define LOOP_SET_FD 0x4C00
#define LOOP_CHANGE_FD 0x4C06
#define LOOP_CONFIGURE 0x4C0A
#define UDMABUF_CREATE 0x40187542
#define UDMABUF_CREATE_LIST 0x40087543
#define IOMMU_IOAS_MAP_FILE 0x3B8F
#define FUSE_DEV_IOC_BACKING_OPEN 0x4010E501
/* The commands of linux/falloc.h without the size of their argument, which differs for 32-bit calls. */
#define WITHOUT_SIZE(command) ((command) & 0xC000FFFF)
#define FS_IOC_RESVSP 0x40005828
#define FS_IOC_UNRESVSP 0x40005829
#define FS_IOC_RESVSP64 0x4000582A
#define FS_IOC_UNRESVSP64 0x4000582B
#define FS_IOC_ZERO_RANGE 0x40005839
/* Items of one UDMABUF_CREATE_LIST that are examined. */
#define MAX_LIST 64
#define EFAULT 14
#define S_IFCHR 0020000

static __always_inline enum ioctl_effect effect_of(__u32 command)
{
	switch (command) {
	case LOOP_SET_FD:
	case LOOP_CHANGE_FD:
	case LOOP_CONFIGURE:
	case UDMABUF_CREATE:
	case UDMABUF_CREATE_LIST:
	case IOMMU_IOAS_MAP_FILE:
	case FUSE_DEV_IOC_BACKING_OPEN:
		return IOCTL_ATTACHES;
	}
	switch (WITHOUT_SIZE(command)) {
	case FS_IOC_RESVSP:
	case FS_IOC_RESVSP64:
		return IOCTL_ALLOCATES;
	case FS_IOC_UNRESVSP:
	case FS_IOC_UNRESVSP64:
	case FS_IOC_ZERO_RANGE:
		return IOCTL_WRITES;
	}
	return IOCTL_NONE;
}

/* True for the open file of a device. Only a device knows a command of attaches_permanently(). */
__noinline bool is_device(__u64 address)
{
	struct file___of_descriptor *file = (void *)address;
	unsigned short mode = 0;
	struct inode *inode;
	__u64 at = 0;

	if (!file || !read_word(&at, &file->f_inode) || !at)
		return false;
	inode = (void *)at;
	return !bpf_core_read(&mode, sizeof(mode), &inode->i_mode) && (mode & S_IFMT) == S_IFCHR;
}

/*
 * True if the effect of the command outlives every later observation. The daemon of a FUSE file system may let any process
 * write to the file, and iommufd pins and releases pages when a device needs them.
 */
static __always_inline bool attaches_permanently(__u32 command)
{
	return command == IOMMU_IOAS_MAP_FILE || command == FUSE_DEV_IOC_BACKING_OPEN;
}

/*
 * True if a command of attaches_permanently() may have attached its file. IOMMU_IOAS_MAP_FILE has done so if it cannot write its
 * result to the caller.
 */
static __always_inline bool may_have_attached(__u32 command, long result)
{
	return result >= 0 || (command == IOMMU_IOAS_MAP_FILE && result == -EFAULT);
}

/* Counts a command of attaches_permanently() that may have attached its file. */
static __always_inline void count_permanent_attachment(struct fdmap_write_control *host, __u64 id)
{
	struct fdmap_followed_file *followed = id ? file_of(id) : NULL;

	if (id == FDMAP_ANY_FILE)
		count(&host->permanent_attachments);
	else if (followed)
		count(&followed->permanent_attachments);
}

static __always_inline void attach_descriptor(__u32 descriptor)
{
	__u64 id = id_of(open_file(descriptor));
	struct fdmap_followed_file *followed = id ? file_of(id) : NULL;

	if (followed)
		count(&followed->attached);
}

static __always_inline void attach_list(struct fdmap_write_control *host, __u64 list)
{
	__u32 items = 0, descriptor = 0;

	/* struct udmabuf_create_list: flags, count, then items of 24 bytes that begin with the descriptor. */
	if (bpf_probe_read_user(&items, sizeof(items), (void *)list + 4) || items > MAX_LIST) {
		count(&host->attached);
		return;
	}
	for (__u32 i = 0; i < MAX_LIST && i < items; i++) {
		if (bpf_probe_read_user(&descriptor, sizeof(descriptor), (void *)list + 8 + i * 24)) {
			count(&host->attached);
			return;
		}
		attach_descriptor(descriptor);
	}
}

/* Reads the descriptor of the file that the command names. UDMABUF_CREATE_LIST names several. Returns false if it cannot be read. */
static __always_inline bool read_descriptor(__u32 *descriptor, __u32 command, __u64 argument)
{
	__u32 offset = 0;

	switch (command) {
	case LOOP_SET_FD:
	case LOOP_CHANGE_FD:
		*descriptor = argument;
		return true;
	case IOMMU_IOAS_MAP_FILE:
		offset = 12; /* struct iommu_ioas_map_file: size, flags, ioas_id, fd */
		/* fall through */
	default: /* the argument begins with the descriptor */
		return !bpf_probe_read_user(descriptor, sizeof(*descriptor), (void *)argument + offset);
	}
}

/* Counts a call that attaches files to a device, when it begins and when it ends. */
static __always_inline void count_attachment(struct fdmap_write_control *host, __u32 command, __u64 argument)
{
	__u32 descriptor = 0;

	if (command == UDMABUF_CREATE_LIST)
		attach_list(host, argument);
	else if (read_descriptor(&descriptor, command, argument))
		attach_descriptor(descriptor);
	else
		count(&host->attached);
}

/* The id of the followed file that a command of attaches_permanently() names, or 0; FDMAP_ANY_FILE if it cannot be read. */
static __always_inline __u64 attached_file(__u32 command, __u64 argument)
{
	__u32 descriptor = 0;

	return read_descriptor(&descriptor, command, argument) ? id_of(open_file(descriptor)) : FDMAP_ANY_FILE;
}

#endif
