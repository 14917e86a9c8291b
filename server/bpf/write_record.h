/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * The data that file_writes.bpf.c shares with tracking/observe/trace. This header is the only definition: the build
 * generates the Rust types from it (server/build.rs).
 */
#ifndef FDMAP_WRITE_RECORD_H
#define FDMAP_WRITE_RECORD_H

/* A length that extends to the highest offset. */
#define FDMAP_TO_THE_END (~0ULL)

/* The classes of system calls that the programs distinguish, with the arguments that they read. */
enum fdmap_call : __u8 {
	FDMAP_CALL_NONE,
	FDMAP_CALL_WRITE,     /* fd, -, length: at the file position */
	FDMAP_CALL_WRITEV,    /* fd: at the file position, length unknown */
	FDMAP_CALL_PWRITE,    /* fd, -, length, offset */
	FDMAP_CALL_PWRITEV,   /* fd, -, -, offset */
	FDMAP_CALL_PWRITEV2,  /* fd, -, -, offset or -1 */
	FDMAP_CALL_SENDFILE,  /* fd, -, -, length: at the file position, without its lock */
	FDMAP_CALL_SPLICE,    /* -, -, fd, pointer to the offset or NULL; also copy_file_range */
	FDMAP_CALL_FALLOCATE, /* fd, -, offset, length */
	FDMAP_CALL_FTRUNCATE, /* fd, size */
	FDMAP_CALL_LSEEK,     /* fd */
	FDMAP_CALL_OPEN,      /* -, flags */
	FDMAP_CALL_OPENAT,    /* -, -, flags */
	FDMAP_CALL_OPENAT2,   /* flags in memory; also creat, which always truncates */
	FDMAP_CALL_MMAP,      /* -, -, -, flags, fd */
	FDMAP_CALL_OLD_MMAP,  /* the arguments of mmap in memory, 32 bits each */
	FDMAP_CALL_IO_SUBMIT,
	FDMAP_CALL_TRUNCATE,  /* by path */
	FDMAP_CALL_MADVISE,   /* address, length, advice */
	FDMAP_CALL_PROCESS_MADVISE, /* -, ranges, their number, advice */
	FDMAP_CALL_MREMAP,    /* address, length, new length; returns the new address */
	FDMAP_CALL_REMAP_FILE_PAGES, /* address, length */
	FDMAP_CALL_SHMAT,     /* returns the address */
	FDMAP_CALL_IPC,       /* 32 bits only: which call, of which the programs use shmat */
	FDMAP_CALL_IOCTL,     /* fd, command, argument */
};

/* The classes of one system call number, which 64-bit and 32-bit calls use differently. */
struct fdmap_call_number {
	enum fdmap_call native;
	enum fdmap_call compat;
};

/* Entries of the system call table. x32 calls have numbers of their own from 512 on. */
#define FDMAP_CALLS 548

/* In place of the id of a followed file: it could not be determined. */
#define FDMAP_ANY_FILE (~0ULL)

/* State of the whole host. The counters never decrease. All but `skipped` and `unmatched` change only while a file is followed. */
struct fdmap_write_control {
	__u64 followed; /* number of followed files, written by the service. At 0 the programs count `skipped` only */
	__u64 begun;    /* entries added to in_flight */
	__u64 ended;    /* entries removed from in_flight */
	/* Writers whose ranges are unknown. Each counts when it begins and again when it ends, calls in `unmatched` only then. */
	__u64 unmatched; /* calls and requests that may write to any followed file */
	__u64 paths;     /* calls and requests that truncate or empty a file by its path */
	__u64 stacked;   /* calls and requests that write to a file of a stacked file system, such as overlayfs */
	__u64 attached;  /* calls that attach files to a device which could not be determined */
	__u64 stacked_mappings; /* calls of mmap that map a file of a stacked file system, and not privately */
	__u64 mappings;  /* calls that may have mapped any followed file, counted when they end, but for remaps. Until then they
			  * are in calls_on_any */
	__u64 any_begun; /* calls that may map any followed file, counted when they begin: entries added to calls_on_any */
	__u64 any_ended; /* entries of such calls removed from calls_on_any */
	__u64 segments_begun; /* the same for shmat, which may attach any System V segment */
	__u64 segments_ended;
	__u64 permanent_attachments; /* calls that permanently attached a file that could not be determined */
	__u64 uncounted; /* calls that may map or write to any followed file, for which calls_on_any had no room */
	__u64 calling;   /* tasks that find_calls found in a call that may map or write to any followed file */
	__u64 calling_stacked; /* the same for calls on files of a stacked file system */
	__u64 writes_begun; /* as any_begun, for calls that may write to any followed file, or remove its pages; also entries added to
			     * requests_on_any */
	__u64 writes_ended;
	__u64 others_begun; /* as writes_begun, for those that may write to a followed file without naming it: by path, or through
			     * another file */
	__u64 others_ended;
	__u64 stacked_silent; /* calls and requests that write to a file of a stacked file system, and raise no event on the file of the
			       * lower one */
	__u64 skipped;   /* io_uring requests that may write to any file, whose end is not observed: they have no completion event.
			  * Counted since the service started, also while no file is followed */
	__u64 observed_since; /* CLOCK_MONOTONIC when `skipped` began to be counted, in nanoseconds; written by the service */
	__u64 unknown_moves; /* io_uring requests that may move the position of any file */
	__u64 earlier_rings; /* tasks that find_calls found with an io_uring, which may be older than that */
	__u64 remaps_begun; /* as any_begun, for calls that change a mapping of an unknown file. Each is noted in remapping_spaces before */
	__u64 remaps_ended;
};

/* One followed file. All members but id are counters that never decrease. */
struct fdmap_followed_file {
	__u64 id;          /* written by the service before the file is followed */
	__u64 begun;       /* entries added to in_flight */
	__u64 ended;       /* entries removed from in_flight, each after its record was submitted */
	__u64 records;     /* records submitted */
	__u64 lost;        /* events that could not be recorded */
	__u64 moves_begun; /* calls that may move a file position backwards */
	__u64 moves_ended;
	__u64 mapped;      /* calls that map the file, counted at least once when they begin and once when they end; shmat only when it ends */
	__u64 requests_begun; /* io_uring requests that may write to the file */
	__u64 requests_ended;
	__u64 attached;    /* calls that attach the file to a device, counted when they begin and when they end */
	__u64 permanent_attachments; /* calls that attached the file to what may write to it at any time: iommufd, FUSE passthrough */
	__u64 uncounted;   /* calls for which in_flight had no room */
	__u64 calling;     /* tasks that find_calls found in a call that may map or write to the file */
	__u64 remapped;    /* those calls in `mapped` that no seal refuses: mremap, remap_file_pages */
};

/* Calls by which an address space changes mappings of unknown files. */
struct fdmap_remaps {
	__u64 begun;
	__u64 ended;
};

/* How the range of a call is determined when the call ends. */
enum fdmap_place : __u16 {
	FDMAP_PLACE_OFFSET,    /* at offset, with the returned length */
	FDMAP_PLACE_POSITION,  /* from start to the file position at the end */
	FDMAP_PLACE_REQUESTED, /* the whole requested range */
	FDMAP_PLACE_NOWHERE,   /* the call writes nothing, but moves the file position */
	FDMAP_PLACE_INODE,     /* the call changes the inode, but no content */
	FDMAP_PLACE_DEVICE,    /* the call attaches the file to a device, by the ioctl command in start */
	FDMAP_PLACE_MAPPING,   /* the call maps the file: a mapping that it made may be written before it ends */
};

/* A write that has ended, or the most that a call in flight can write. */
struct fdmap_write_record {
	__u64 id;     /* of the followed file */
	__u64 offset; /* bytes */
	__u64 length; /* bytes, or FDMAP_TO_THE_END; 0: the call changed no content */
	__u64 thread; /* that made the call, in the initial pid namespace */
};

/* A call that has begun. */
struct fdmap_write_in_flight {
	struct fdmap_write_record write;
	__u64 start;   /* the file position, or an ioctl command */
	__u64 file;    /* struct file; the service does not use it */
	__u64 moves;   /* moves_begun of the file when the call began */
	__u32 descriptor;
	enum fdmap_place place;
	__u8 moving;  /* 1 if the call is counted in moves_begun */
	enum fdmap_call call;
};

#endif
