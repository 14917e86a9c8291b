/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * What file_writes.bpf.c and dirty/trace/ share: mirrored in dirty/trace/record.rs. Sizes are asserted on both sides and
 * compared with the loaded maps.
 */
#ifndef FDMAP_WRITE_RECORD_H
#define FDMAP_WRITE_RECORD_H

/* A length that reaches to the end of all offsets. */
#define FDMAP_TO_THE_END (~0ULL)

/* What a system call does, as far as the programs care, and its arguments. */
enum fdmap_call {
	FDMAP_CALL_NONE,
	FDMAP_CALL_WRITE,     /* fd, -, length: at the descriptor's position */
	FDMAP_CALL_WRITEV,    /* fd: the same, length unknown */
	FDMAP_CALL_PWRITE,    /* fd, -, length, offset */
	FDMAP_CALL_PWRITEV,   /* fd, -, -, offset */
	FDMAP_CALL_PWRITEV2,  /* fd, -, -, offset or -1 */
	FDMAP_CALL_SENDFILE,  /* fd, -, -, length: at the position, which is not locked */
	FDMAP_CALL_SPLICE,    /* -, -, fd, pointer to the offset or nothing, length; copy_file_range too */
	FDMAP_CALL_FALLOCATE, /* fd, -, offset, length */
	FDMAP_CALL_FTRUNCATE, /* fd, size */
	FDMAP_CALL_LSEEK,     /* fd */
	FDMAP_CALL_OPEN,      /* -, flags */
	FDMAP_CALL_OPENAT,    /* -, -, flags */
	FDMAP_CALL_OPENAT2,   /* flags in memory; creat too, which always truncates */
	FDMAP_CALL_MMAP,      /* -, -, -, flags, fd */
	FDMAP_CALL_OLD_MMAP,  /* the same in memory, 32 bits each */
	FDMAP_CALL_IO_SUBMIT,
	FDMAP_CALL_TRUNCATE,  /* by path */
	FDMAP_CALL_MADVISE,   /* -, -, advice */
};

/* An entry of the table of system calls: 64-bit and 32-bit calls have numbers of their own. */
struct fdmap_call_number {
	__u8 native;
	__u8 compat;
};

/* Numbers of system calls that the table has room for. */
#define FDMAP_CALLS 512

/* Of the whole host. Counters only grow, and only while a file is followed. */
struct fdmap_write_control {
	__u64 followed; /* files; written by the service. 0: nothing is looked at */
	__u64 begun;    /* entries made in in_flight */
	__u64 ended;    /* entries removed from it */
	/* Writers whose ranges are not seen; they count when they begin and once more when they end. */
	__u64 io_uring; /* requests that may write to a file */
	__u64 aio;      /* calls of io_submit that may write to a followed file */
	__u64 paths;    /* calls of truncate */
	__u64 removals; /* calls of madvise(MADV_REMOVE) */
};

/* One followed file. All are counters that only grow. */
struct fdmap_followed_file {
	__u64 id;          /* written by the service before the file is followed */
	__u64 begun;       /* entries made in in_flight */
	__u64 ended;       /* entries removed from it, each after its record was made */
	__u64 records;     /* records made */
	__u64 lost;        /* times that something could not be recorded */
	__u64 moves_begun; /* calls that may set the position of a descriptor back */
	__u64 moves_ended;
	__u64 mapped; /* calls of mmap, counted when they begin and when they end */
};

/* How the range of a call is found when it ends. */
enum fdmap_place {
	FDMAP_PLACE_OFFSET,   /* at offset, as much as the call returns */
	FDMAP_PLACE_POSITION, /* from start to where the descriptor's position is then */
	FDMAP_PLACE_POINTER,  /* at start, if the pointer has moved on by what the call returns */
	FDMAP_PLACE_ASKED,    /* all that was asked for */
	FDMAP_PLACE_NOWHERE,  /* it writes nothing: it moves the position */
};

/* A call that has begun. */
struct fdmap_write_in_flight {
	__u64 id;
	__u64 offset; /* what it may write to, as far as that can be said now; bytes */
	__u64 length;
	__u64 start;   /* the position, or the offset that the pointer leads to; ~0 if it could not be read */
	__u64 file;    /* struct file; never leaves the process */
	__u64 pointer; /* FDMAP_PLACE_POINTER: in the caller's memory */
	__u64 moves;   /* moves_begun */
	__u32 descriptor;
	__u16 place; /* enum fdmap_place */
	__u16 moving; /* 1: it counts in moves_begun */
};

/* A write that has ended. */
struct fdmap_write_record {
	__u64 id;
	__u64 offset; /* bytes */
	__u64 length; /* bytes, or FDMAP_TO_THE_END */
};

/* Results of follow and unfollow beside FDMAP_STATUS_* of kernel.h. */
#define FDMAP_STATUS_TWICE 4 /* it is followed already, or is not */
#define FDMAP_STATUS_FULL 5  /* as many as can be are */

_Static_assert(sizeof(struct fdmap_write_control) == 56, "dirty/trace/record.rs");
_Static_assert(sizeof(struct fdmap_followed_file) == 64, "dirty/trace/record.rs");
_Static_assert(sizeof(struct fdmap_write_in_flight) == 64, "dirty/trace/record.rs");
_Static_assert(sizeof(struct fdmap_write_record) == 24, "dirty/trace/record.rs");

#endif
