/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * Helpers of the programs in file_writes.bpf.c: the maps, the open files of the calling thread, its entry among the calls in
 * flight, and the records of writes.
 */
#ifndef FDMAP_FILE_WRITES_H
#define FDMAP_FILE_WRITES_H

#include "kernel.h"
#include "write_record.h"

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct pt_regs { /* x86-64; 32-bit calls pass their arguments in bx, cx, dx, si, di */
	unsigned long r10, r9, r8, bx, cx, dx, si, di, orig_ax;
};
struct thread_info___of_task {
	unsigned int status;
};
struct super_block {
	int s_stack_depth;
	unsigned long s_magic;
};
struct inode {
	unsigned short i_mode;
	struct super_block *i_sb;
	long long i_size;
};
struct file___of_descriptor {
	struct inode *f_inode;
	unsigned int f_mode;
	unsigned int f_flags;
	long long f_pos;
	void *private_data;
};
struct fuse_file {
	struct file___of_descriptor *passthrough; /* since 6.9 */
};
struct fdtable___of_task {
	unsigned int max_fds;
	struct file___of_descriptor **fd;
};
struct files_struct___of_task {
	struct fdtable___of_task *fdt;
};
struct io_uring_task {
	struct xarray xa; /* the rings that the task used and that exist */
};
struct task_struct___calling {
	struct thread_info___of_task thread_info;
	struct files_struct___of_task *files;
	void *mm;
	struct io_uring_task *io_uring;
	unsigned long long start_time;
	unsigned int flags;
	unsigned int __state;
};
struct bpf_iter__task {
	struct task_struct___calling *task;
};
struct io_cqe {
	int fd;
};
struct io_rsrc_node {
	unsigned long file_ptr;
};
struct io_rsrc_data {
	unsigned int nr;
	struct io_rsrc_node **nodes;
};
struct io_file_table {
	struct io_rsrc_data data;
};
struct io_ring_ctx {
	struct io_file_table file_table;
};
struct kiocb { /* a request that reads or writes begins with it */
	long long ki_pos;
};
struct io_splice {
	int splice_fd_in;
	unsigned int flags;
};
struct open_how {
	unsigned long long flags;
};
struct io_open {
	struct open_how how;
};
struct io_kiocb {
	struct file___of_descriptor *file;
	unsigned char opcode;
	unsigned long long flags;
	struct io_cqe cqe;
	struct io_ring_ctx *ctx;
};
#pragma clang attribute pop

#define TS_COMPAT 2 /* arch/x86/include/asm/thread_info.h */
#define X32_BIT 0x40000000 /* asm/unistd.h */
#define S_IFMT 0170000
#define S_IFREG 0100000
#define O_TRUNC 01000
#define O_APPEND 02000
#define RWF_APPEND 0x10
#define FMODE_WRITE 2 /* linux/fs.h */
#define FMODE_ATOMIC_POS (1 << 15) /* linux/fs.h */
#define FALLOC_FL_KEEP_SIZE 0x01
#define MOVES_CONTENT 0x28 /* FALLOC_FL_COLLAPSE_RANGE | FALLOC_FL_INSERT_RANGE */
#define MAP_ANONYMOUS 0x20
#define MAP_PRIVATE 2
#define MAP_TYPE 0xf
#define EPERM 1
#define EBADF 9
#define EEXIST 17
#define EINVAL 22
#define EFBIG 27
/* Entries of one thread in in_flight. Only calls on a range that has several mappings need more than one. */
#define MAX_ENTRIES 4
/* Entries of one file in in_flight: further ones would take the room of other files. */
#define MAX_ENTRIES_OF_FILE 256
/* Requests of one io_submit call that are examined. */
#define MAX_REQUESTS 64
/* Bytes that one call writes at most: MAX_RW_COUNT of linux/fs.h with pages of 4 KiB. */
#define MAX_WRITE_BYTES 0x7ffff000ULL

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fdmap_write_control);
} control SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fdmap_followed_file);
} files SEC(".maps"); /* resized by the loader */

/* struct inode -> id, whose low half is the index in files. The service keeps followed files open, so the kernel cannot free an
 * inode and reuse its address while it is a key. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, __u64);
	__type(value, __u64);
} followed SEC(".maps"); /* resized by the loader */

/*
 * Threads that made calls which may have written to a followed file without naming it: by path, or through another file. Value:
 * CLOCK_MONOTONIC when the last of these calls ended, in nanoseconds. The service deletes entries.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, __u64);
} other_writers SEC(".maps");

/* Key: entry_key(). */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, struct fdmap_write_in_flight);
} in_flight SEC(".maps");

/* Calls in progress that may concern any followed file. Key: thread; value: enum call_on_any. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, __u8);
} calls_on_any SEC(".maps");

/*
 * Address spaces that move, grow or duplicate a mapping of a file that could not be determined: it is one that they map already.
 * Key: mm_struct.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, struct fdmap_remaps);
} remapping_spaces SEC(".maps");

/* The same for io_uring requests. Key: struct io_kiocb. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, __u8);
} requests_on_any SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} records SEC(".maps"); /* resized by the loader */

/* By number of the system call; filled in by the loader. */
const volatile struct fdmap_call_number calls[FDMAP_CALLS] = { { 1, 1 } };

static __always_inline struct fdmap_write_control *the_control(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&control, &zero);
}

static __always_inline struct fdmap_followed_file *file_of(__u64 id)
{
	__u32 slot = id;

	return bpf_map_lookup_elem(&files, &slot);
}

static __always_inline void count(__u64 *counter)
{
	__sync_fetch_and_add(counter, 1);
}

/*
 * The next two functions are global: the verifier checks them once for each program, not once for each state of their callers.
 * It searches all types of the kernel at each pointer that is read from a task, which took most of the load time of the programs.
 */

/* The address of the open file behind a descriptor of the calling thread, or 0. */
__noinline __u64 address_of_open_file(__u32 descriptor)
{
	struct task_struct___calling *task = (void *)bpf_get_current_task_btf();
	struct fdtable___of_task *table = task->files->fdt;
	__u64 file = 0;

	if (descriptor < table->max_fds)
		read_word(&file, table->fd + descriptor);
	return file;
}

/* The id of the followed file behind the open file at an address; 0 if the file is not followed. */
__noinline __u64 id_at(__u64 address)
{
	struct file___of_descriptor *file = (void *)address;
	unsigned short mode = 0;
	struct inode *inode;
	__u64 key = 0, *id;

	if (!file || !read_word(&key, &file->f_inode))
		return 0;
	inode = (void *)key;
	if (bpf_ksym_exists(bpf_rdonly_cast)) {
		inode = bpf_rdonly_cast(inode, bpf_core_type_id_kernel(struct inode));
		mode = inode->i_mode;
	} else {
		bpf_core_read(&mode, sizeof(mode), &inode->i_mode);
	}
	if ((mode & S_IFMT) != S_IFREG)
		return 0;
	id = bpf_map_lookup_elem(&followed, &key);
	return id ? *id : 0;
}

static __always_inline struct file___of_descriptor *open_file(__u32 descriptor)
{
	return (void *)address_of_open_file(descriptor);
}

static __always_inline __u64 id_of(struct file___of_descriptor *file)
{
	return id_at((__u64)file);
}

/* Reads a counter. The compiler does not reorder these reads. */
static __always_inline __u64 read_counter(__u64 *counter)
{
	return *(volatile __u64 *)counter;
}

/* True if any call is in flight. Always true if the calling thread has a call in flight: ended is read first and does not
 * include that call, begun is read second and does. */
static __always_inline bool any_in_flight(struct fdmap_write_control *host)
{
	__u64 ended = read_counter(&host->ended);

	return read_counter(&host->begun) != ended;
}

/* The class of the system call with this number; FDMAP_CALL_NONE for nearly all. The kernel ignores the upper half of the register. */
static __always_inline __u32 call_of(__u64 number, bool *compat)
{
	struct task_struct___calling *task;
	__u32 native, by_compat;

	/* x32 calls have the arguments of native ones in the same registers. */
	number &= (__u32)~X32_BIT;
	if (number >= FDMAP_CALLS)
		return FDMAP_CALL_NONE;
	native = calls[number].native;
	by_compat = calls[number].compat;
	if (!(native | by_compat))
		return FDMAP_CALL_NONE;
	task = (void *)bpf_get_current_task_btf();
	*compat = task->thread_info.status & TS_COMPAT;
	return *compat ? by_compat : native;
}

/* The same for the call of any task. */
static __always_inline __u32 call_of_task(struct task_struct___calling *task, __u64 number, bool *compat)
{
	number &= (__u32)~X32_BIT;
	if (number >= FDMAP_CALLS)
		return FDMAP_CALL_NONE;
	*compat = BPF_CORE_READ(task, thread_info.status) & TS_COMPAT;
	return *compat ? calls[number].compat : calls[number].native;
}

/* True for x32 calls, whose arguments in memory have the 32-bit format. */
static __always_inline bool is_x32(struct pt_regs *regs)
{
	return regs->orig_ax & X32_BIT;
}

/* struct iocb of linux/aio_abi.h, up to the descriptor. */
struct request {
	__u64 data;
	__u32 key;
	__u32 flags;
	__u16 operation;
	__s16 priority;
	__u32 descriptor;
};

/* True for operations that do not write to a file. */
static __always_inline bool only_reads(__u16 operation)
{
	switch (operation) {
	case 0: /* PREAD */
	case 2: /* FSYNC */
	case 3: /* FDSYNC */
	case 5: /* POLL */
	case 6: /* NOOP */
	case 7: /* PREADV */
		return true;
	default:
		return false;
	}
}

#define FUSE_SUPER_MAGIC 0x65735546 /* linux/magic.h */

/*
 * In place of the id of a followed file: the file is not followed, and its file system passes writes to a file of another one, which
 * processes can reach by path.
 */
#define STACKED_FILE (~0ULL - 1)
/* The same, and the file of the other file system is of a stacked one too. If that is FUSE, writes may go to any followed file. */
#define TWICE_STACKED_FILE (~0ULL - 2)

static __always_inline bool is_stacked(__u64 id)
{
	return id == STACKED_FILE || id == TWICE_STACKED_FILE;
}

/* The id of the followed file to which the kernel passes the writes of an open file of FUSE through, or 0. */
static __always_inline __u64 id_behind_fuse(struct file___of_descriptor *file)
{
	__u64 fuse_file = 0, backing = 0;

	if (!read_word(&fuse_file, &file->private_data) || !fuse_file ||
	    !read_word(&backing, &((struct fuse_file *)fuse_file)->passthrough))
		return 0;
	return id_at(backing);
}

/* The regular file of an inode, as far as the programs look at it. */
struct regular_file {
	__u64 id;            /* of the followed file, or 0 */
	int depth;           /* of stacked file systems */
	unsigned long magic; /* of its file system, if depth is not 0 */
};

/* Returns false for an inode that is known to be of another kind. FIFOs and devices do not belong to the lower file system. */
static __always_inline bool look_at(__u64 key, struct regular_file *out)
{
	struct inode *inode = (void *)key;
	struct super_block *super_block;
	unsigned short mode = 0;
	__u64 *id, at = 0;

	if (bpf_ksym_exists(bpf_rdonly_cast)) {
		inode = bpf_rdonly_cast(inode, bpf_core_type_id_kernel(struct inode));
		mode = inode->i_mode;
		if ((mode & S_IFMT) != S_IFREG)
			return false;
		super_block = bpf_rdonly_cast(inode->i_sb, bpf_core_type_id_kernel(struct super_block));
		out->depth = super_block->s_stack_depth;
		if (out->depth)
			out->magic = super_block->s_magic;
	} else {
		if (!bpf_core_read(&mode, sizeof(mode), &inode->i_mode) && (mode & S_IFMT) != S_IFREG)
			return false;
		if (read_word(&at, &inode->i_sb)) {
			super_block = (void *)at;
			bpf_core_read(&out->depth, sizeof(out->depth), &super_block->s_stack_depth);
			bpf_core_read(&out->magic, sizeof(out->magic), &super_block->s_magic);
		}
	}
	id = bpf_map_lookup_elem(&followed, &key);
	out->id = id ? *id : 0;
	return true;
}

/* The id of the followed file that writes to an open file change, or 0; STACKED_FILE or TWICE_STACKED_FILE. */
__noinline __u64 written_id(__u64 address)
{
	struct file___of_descriptor *file = (void *)address;
	struct regular_file regular = {};
	__u64 key = 0;

	if (!file || !read_word(&key, &file->f_inode) || !key || !look_at(key, &regular))
		return 0;
	if (regular.id || regular.depth <= 0)
		return regular.id;
	if (regular.magic == FUSE_SUPER_MAGIC) {
		/* Without its types, FUSE is a module that was loaded later, and the file behind is unknown. */
		if (!bpf_core_field_exists(struct fuse_file, passthrough))
			return TWICE_STACKED_FILE;
		key = id_behind_fuse(file);
		if (key)
			return key;
	}
	return regular.depth > 1 ? TWICE_STACKED_FILE : STACKED_FILE;
}

enum call_on_any {
	MAPS_ANY,
	REMAPS_ANY,   /* any file that the address space maps */
	MAPS_SEGMENT, /* any System V segment */
	WRITES_ANY,   /* or removes pages */
	WRITES_OTHER, /* by path, or to a file of a stacked file system */
	WRITES_STACKED, /* a request on a file of a stacked file system; counted as WRITES_OTHER while it is in progress */
	NO_KIND,
	NO_EXIT,      /* in place of a harmless kind: the exit of the call was not observed */
};

static __always_inline __u64 *begun_of(struct fdmap_write_control *host, __u8 kind)
{
	return kind == WRITES_ANY ? &host->writes_begun : kind == MAPS_SEGMENT ? &host->segments_begun :
	       kind == REMAPS_ANY ? &host->remaps_begun :
	       kind == WRITES_OTHER || kind == WRITES_STACKED ? &host->others_begun : &host->any_begun;
}

static __always_inline __u64 *ended_of(struct fdmap_write_control *host, __u8 kind)
{
	return kind == WRITES_ANY ? &host->writes_ended : kind == MAPS_SEGMENT ? &host->segments_ended :
	       kind == REMAPS_ANY ? &host->remaps_ended :
	       kind == WRITES_OTHER || kind == WRITES_STACKED ? &host->others_ended : &host->any_ended;
}

/* The next three functions are global, so that their variables are not on the stack of their callers as well. */

/* The calling thread may have written to a followed file without naming it. */
__noinline int note_other_writer(void)
{
	__u64 thread = (__u32)bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
	struct fdmap_write_control *host = the_control();

	if (host && bpf_map_update_elem(&other_writers, &thread, &now, BPF_ANY))
		count(&host->unmatched);
	return 0;
}

/*
 * A call of the calling thread begins or ends that moves, grows or duplicates a mapping of a file that could not be determined.
 * Returns false if it cannot be noted.
 */
__noinline int note_remap(bool begins)
{
	struct task_struct___calling *task = (void *)bpf_get_current_task_btf();
	struct fdmap_remaps none = {}, *noted;
	__u64 space = (__u64)task->mm;

	/* Fails if there is an entry. */
	bpf_map_update_elem(&remapping_spaces, &space, &none, BPF_NOEXIST);
	noted = bpf_map_lookup_elem(&remapping_spaces, &space);
	if (noted)
		count(begins ? &noted->begun : &noted->ended);
	return noted != NULL;
}

/* True if a call may be in progress that is counted there. Always true if one of the calling thread is: ended is read first. */
static __always_inline bool may_be_in_progress(__u64 *begun, __u64 *ended)
{
	__u64 before = read_counter(ended);

	return read_counter(begun) != before;
}

/*
 * A call of the calling thread ends that may concern any file. Its entry counts, unless it is of the kind `harmless`: it is known by
 * now that the call mapped or wrote to none, or it was counted otherwise.
 */
__noinline int end_call_on_any(__u32 harmless)
{
	__u64 thread = (__u32)bpf_get_current_pid_tgid();
	struct fdmap_write_control *host = the_control();
	__u8 *entry, kind;

	if (!host)
		return 0;
	if (!may_be_in_progress(&host->any_begun, &host->any_ended) &&
	    !may_be_in_progress(&host->remaps_begun, &host->remaps_ended) &&
	    !may_be_in_progress(&host->segments_begun, &host->segments_ended) &&
	    !may_be_in_progress(&host->writes_begun, &host->writes_ended) &&
	    !may_be_in_progress(&host->others_begun, &host->others_ended))
		return 0;
	entry = bpf_map_lookup_elem(&calls_on_any, &thread);
	if (!entry)
		return 0;
	kind = *entry;
	if (kind == WRITES_ANY && kind != harmless)
		count(&host->unmatched);
	else if (kind == MAPS_ANY && kind != harmless)
		/* It may have mapped another file than its arguments name now. */
		count(&host->mappings);
	else if (kind == REMAPS_ANY && (harmless == NO_EXIT || !note_remap(false)))
		/* The thread may have another address space now. */
		count(&host->mappings);
	else if (kind == WRITES_OTHER && kind != harmless)
		note_other_writer();
	bpf_map_delete_elem(&calls_on_any, &thread);
	count(ended_of(host, kind));
	return 0;
}

/* A call begins that may concern any followed file. `uncounted`: see add_entry(). */
__noinline int begin_call_on_any(__u32 kind)
{
	__u64 thread = (__u32)bpf_get_current_pid_tgid();
	struct fdmap_write_control *host = the_control();
	__u8 entry = kind;

	if (!host)
		return 0;
	/* The thread may have an entry whose exit was not observed. */
	end_call_on_any(NO_EXIT);
	if (entry == REMAPS_ANY && !note_remap(true))
		entry = MAPS_ANY;
	count(begun_of(host, entry));
	if (bpf_map_update_elem(&calls_on_any, &thread, &entry, BPF_NOEXIST)) {
		count(&host->uncounted);
		count(ended_of(host, entry));
	}
	return 0;
}

/*
 * A call of the calling thread ends that may have written to a followed file without naming it. Noted before its entry is removed:
 * a reader always finds the entry or the note.
 */
static __always_inline void end_other_write(bool harmless)
{
	if (!harmless)
		note_other_writer();
	end_call_on_any(harmless ? WRITES_OTHER : NO_KIND);
}

/* A call begins, or has ended, that may write to other files than those that it is known to name. */
static __always_inline void note_unmatched(struct fdmap_write_control *host, bool begins)
{
	if (begins)
		begin_call_on_any(WRITES_ANY);
	else
		count(&host->unmatched);
}

/*
 * The calling thread begins or ends a call that writes to a file of a stacked file system. Such a write raises an event on the file
 * that it changes, but perhaps only after a part of it.
 */
static __always_inline void note_stacked(struct fdmap_write_control *host, __u64 id, bool begins)
{
	count(&host->stacked);
	if (begins) {
		begin_call_on_any(id == TWICE_STACKED_FILE ? WRITES_ANY : WRITES_OTHER);
	} else {
		note_other_writer();
		end_call_on_any(id == TWICE_STACKED_FILE ? WRITES_ANY : NO_KIND);
	}
}

/* The id of the first followed file that the requests of io_submit write to; 0 if there is none. Requests that cannot be read, and
 * further followed files, may be any file. Called when io_submit begins and when it ends: on tmpfs its requests are complete then. */
static __always_inline __u64 submitted_write(struct fdmap_write_control *host, struct pt_regs *regs, bool compat, bool begins)
{
	__u64 requests = regs->si, *pointers = (void *)regs->dx, found = 0;
	bool uncertain = false;

	if (compat || is_x32(regs) || requests > MAX_REQUESTS) {
		note_unmatched(host, begins);
		return 0;
	}
	for (__u32 i = 0; i < MAX_REQUESTS && i < requests; i++) {
		struct request request = {};
		__u64 address = 0, id;

		if (bpf_probe_read_user(&address, sizeof(address), pointers + i) ||
		    bpf_probe_read_user(&request, sizeof(request), (void *)address)) {
			uncertain = true;
			continue;
		}
		if (only_reads(request.operation))
			continue;
		id = written_id(address_of_open_file(request.descriptor));
		if (is_stacked(id)) {
			/* Other requests of the call may have its entry in calls_on_any. */
			if (begins) {
				note_stacked(host, id, true);
			} else {
				count(&host->stacked);
				note_other_writer();
			}
			continue;
		}
		if (!found) {
			found = id;
		} else if (id && id != found) {
			uncertain = true;
		}
	}
	if (uncertain)
		note_unmatched(host, begins);
	return found;
}

/* Counts a call whose range is unknown, when it begins and when it ends. Returns false for all other calls. */
static __always_inline bool count_rangeless(struct fdmap_write_control *host, struct pt_regs *regs, __u32 call, bool begins)
{
	switch (call) {
	case FDMAP_CALL_TRUNCATE:
		count(&host->paths);
		if (begins)
			begin_call_on_any(WRITES_OTHER);
		else
			end_other_write(false);
		return true;
	default:
		return false;
	}
}

/* The descriptor that the call writes to. */
static __always_inline __u32 descriptor_of(struct pt_regs *regs, __u32 call, bool compat)
{
	if (call == FDMAP_CALL_SPLICE)
		return regs->dx;
	return compat ? regs->bx : regs->di;
}

/* The id of the file that the call reads from, if that file is followed: the call may move its file position. */
static __always_inline __u64 source_of(struct pt_regs *regs, __u32 call, bool compat)
{
	if (call == FDMAP_CALL_SENDFILE)
		return id_of(open_file(compat ? regs->cx : regs->si));
	if (call == FDMAP_CALL_SPLICE)
		return id_of(open_file(compat ? regs->bx : regs->di));
	return 0;
}

static __always_inline void record(__u64 id, __u64 offset, __u64 length)
{
	struct fdmap_followed_file *file = file_of(id);
	struct fdmap_write_record *record;

	if (!file)
		return;
	record = bpf_ringbuf_reserve(&records, sizeof(*record), 0);
	if (!record) {
		count(&file->lost);
		return;
	}
	record->id = id;
	record->offset = offset;
	record->length = length;
	record->thread = (__u32)bpf_get_current_pid_tgid();
	/* The service polls the ring buffer, so no wake-up is needed. */
	bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
	count(&file->records);
}

static __always_inline void record_everything(__u64 id)
{
	record(id, 0, FDMAP_TO_THE_END);
}

/* The key of an entry in in_flight: pid_tgid of the thread, whose halves have 22 bits, and a number below MAX_ENTRIES. */
static __always_inline __u64 entry_key(__u64 thread, __u32 nth)
{
	return thread | (__u64)nth << 56;
}

/* Removes an entry of the calling thread, after its record was submitted: at any time a write is in flight or recorded. */
static __always_inline void remove_entry(struct fdmap_write_control *host, __u64 key, struct fdmap_write_in_flight *entry)
{
	struct fdmap_followed_file *file = file_of(entry->write.id);

	if (file && entry->moving)
		count(&file->moves_ended);
	bpf_map_delete_elem(&in_flight, &key);
	if (file)
		count(&file->ended);
	count(&host->ended);
}

/* The result of the call is unknown: record all that it could have written. */
static __always_inline void end_without_result(struct fdmap_write_control *host, __u64 key,
					       struct fdmap_write_in_flight *entry)
{
	struct fdmap_followed_file *followed;

	switch (entry->place) {
	case FDMAP_PLACE_NOWHERE:
		break;
	case FDMAP_PLACE_MAPPING:
		/* Its arguments may name another file now. */
		followed = file_of(entry->write.id);
		if (followed)
			count(&followed->mapped);
		break;
	default:
		record(entry->write.id, entry->write.offset, entry->write.length);
	}
	remove_entry(host, key, entry);
}

/* Ends the first entries of the calling thread. */
static __always_inline void end_entries(struct fdmap_write_control *host, __u64 thread, __u32 entries)
{
	if (!any_in_flight(host))
		return;
	for (__u32 nth = 0; nth < entries; nth++) {
		__u64 key = entry_key(thread, nth);
		struct fdmap_write_in_flight *entry = bpf_map_lookup_elem(&in_flight, &key);

		if (entry)
			end_without_result(host, key, entry);
	}
}

/* Adds an entry of the calling thread, and counts its call. Without room for it, the call is counted in `uncounted`: it is in
 * progress until find_calls finds no such call, and its exit is handled like that of a call that began before the file was followed. */
static __always_inline void add_entry(struct fdmap_write_control *host, struct fdmap_followed_file *followed, __u64 key,
				      struct fdmap_write_in_flight *entry)
{
	/* Read in this order, the difference is not negative. */
	__u64 ended = read_counter(&followed->ended);
	bool has_room = read_counter(&followed->begun) - ended < MAX_ENTRIES_OF_FILE;
	struct fdmap_write_in_flight *stale;

	count(&followed->begun);
	count(&host->begun);
	if (has_room && !bpf_map_update_elem(&in_flight, &key, entry, BPF_NOEXIST))
		return;
	/* The thread may have an entry whose exit was not observed. */
	stale = bpf_map_lookup_elem(&in_flight, &key);
	if (stale)
		end_without_result(host, key, stale);
	if (!has_room || bpf_map_update_elem(&in_flight, &key, entry, BPF_NOEXIST)) {
		count(&followed->uncounted);
		if (entry->moving)
			count(&followed->moves_ended);
		count(&followed->ended);
		count(&host->ended);
	}
}

#endif
