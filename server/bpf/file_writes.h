/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * What the programs of file_writes.bpf.c stand on: the maps, the open files of the calling thread, its entry among the calls
 * in flight, and records of what was written.
 */
#ifndef FDMAP_FILE_WRITES_H
#define FDMAP_FILE_WRITES_H

#include "kernel.h"
#include "write_record.h"

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct pt_regs { /* x86-64; for 32-bit calls the arguments are in bx, cx, dx, si, di */
	unsigned long r10, r9, r8, bx, cx, dx, si, di, orig_ax;
};
struct thread_info___of_task {
	unsigned int status;
};
struct inode {
	unsigned short i_mode;
};
struct file___of_descriptor {
	struct inode *f_inode;
	unsigned int f_mode;
	unsigned int f_flags;
	long long f_pos;
};
struct fdtable___of_task {
	unsigned int max_fds;
	struct file___of_descriptor **fd;
};
struct files_struct___of_task {
	struct fdtable___of_task *fdt;
};
struct task_struct___calling {
	struct thread_info___of_task thread_info;
	struct files_struct___of_task *files;
};
struct io_kiocb {
	unsigned char opcode;
};
#pragma clang attribute pop

#define TS_COMPAT 2 /* arch/x86/include/asm/thread_info.h */
#define S_IFMT 0170000
#define S_IFREG 0100000
#define O_TRUNC 01000
#define O_APPEND 02000
#define RWF_APPEND 0x10
#define FMODE_ATOMIC_POS (1 << 15) /* linux/fs.h */
#define MOVES_CONTENT 0x28 /* FALLOC_FL_COLLAPSE_RANGE | FALLOC_FL_INSERT_RANGE */
#define MADV_REMOVE 9
#define MAP_ANONYMOUS 0x20
#define EPERM 1
#define EBADF 9
#define EEXIST 17
#define EINVAL 22
#define EFBIG 27
/* Requests of one call of io_submit that are looked at. */
#define MOST_REQUESTS 64
/* What one call writes at most: MAX_RW_COUNT of linux/fs.h. */
#define MOST 0x7ffff000ULL

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

/* struct inode -> id, whose low half is the place in files. The service keeps followed files open, so that no inode is
 * freed and its address used again while it stands here. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, __u64);
	__type(value, __u64);
} followed SEC(".maps"); /* resized by the loader */

/* By thread. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, __u64);
	__type(value, struct fdmap_write_in_flight);
} in_flight SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} records SEC(".maps"); /* resized by the loader */

/* enum fdmap_call by number of the system call; filled in by the loader. */
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

/* The open file of a descriptor of the calling thread, or nothing. */
static __always_inline struct file___of_descriptor *open_file(__u32 descriptor)
{
	struct task_struct___calling *task = (void *)bpf_get_current_task_btf();
	struct fdtable___of_task *table = task->files->fdt;
	__u64 file = 0;

	if (descriptor < table->max_fds)
		read_word(&file, table->fd + descriptor);
	return (void *)file;
}

/* Its id, if its file is followed; otherwise 0. */
static __always_inline __u64 id_of(struct file___of_descriptor *file)
{
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

/* A counter as it is now: such reads stay in their order. */
static __always_inline __u64 now_at(__u64 *counter)
{
	return *(volatile __u64 *)counter;
}

/* True while any call is in flight; always while one of the calling thread is: its own is not among those that ended, which
 * are read first, and is among those that began. */
static __always_inline bool any_in_flight(struct fdmap_write_control *host)
{
	__u64 ended = now_at(&host->ended);

	return now_at(&host->begun) != ended;
}

/* What the call of this number does; FDMAP_CALL_NONE for nearly all. */
static __always_inline __u32 call_of(__u64 number, bool *compat)
{
	struct task_struct___calling *task;
	__u32 native, by_compat;

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

/* One request of io_submit, as linux/aio_abi.h has it, up to the descriptor. */
struct request {
	__u64 data;
	__u32 key;
	__u32 flags;
	__u16 operation;
	__s16 priority;
	__u32 descriptor;
};

/* Operations of those that do not write to a file. */
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

/* True unless all that io_submit is asked for is to leave followed files alone. */
static __always_inline bool submits_a_write(struct pt_regs *regs, bool compat)
{
	__u64 requests = regs->si, *pointers = (void *)regs->dx;

	if (compat || requests > MOST_REQUESTS)
		return true;
	for (__u32 i = 0; i < MOST_REQUESTS && i < requests; i++) {
		struct request request = {};
		__u64 address = 0;

		if (bpf_probe_read_user(&address, sizeof(address), pointers + i) ||
		    bpf_probe_read_user(&request, sizeof(request), (void *)address))
			return true;
		if (!only_reads(request.operation) && id_of(open_file(request.descriptor)))
			return true;
	}
	return false;
}

/* Counts a call of which no range can be told; false if it is none. */
static __always_inline bool count_unseen(struct fdmap_write_control *host, struct pt_regs *regs, __u32 call, bool compat)
{
	switch (call) {
	case FDMAP_CALL_IO_SUBMIT:
		if (submits_a_write(regs, compat))
			count(&host->aio);
		return true;
	case FDMAP_CALL_TRUNCATE:
		count(&host->paths);
		return true;
	case FDMAP_CALL_MADVISE:
		/* The third argument is in dx of 32-bit calls too. */
		if (regs->dx == MADV_REMOVE)
			count(&host->removals);
		return true;
	default:
		return false;
	}
}

/* The descriptor that it writes to. */
static __always_inline __u32 descriptor_of(struct pt_regs *regs, __u32 call, bool compat)
{
	if (call == FDMAP_CALL_SPLICE)
		return regs->dx;
	return compat ? regs->bx : regs->di;
}

/* The id of the file that the call reads from, if that is followed: it may set the position there as well. */
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
	/* Nobody waits for it: the service looks when it wants to know. */
	bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
	count(&file->records);
}

static __always_inline void record_everything(__u64 id)
{
	record(id, 0, FDMAP_TO_THE_END);
}

/* Takes the calling thread's entry away, after its record was made: so a write is always in one of both. */
static __always_inline void forget(struct fdmap_write_control *host, __u64 thread, struct fdmap_write_in_flight *entry)
{
	struct fdmap_followed_file *file = file_of(entry->id);

	if (file && entry->moving)
		count(&file->moves_ended);
	bpf_map_delete_elem(&in_flight, &thread);
	if (file)
		count(&file->ended);
	count(&host->ended);
}

/* Nothing is known of its end: it wrote what it could. */
static __always_inline void end_without_result(struct fdmap_write_control *host, __u64 thread,
					       struct fdmap_write_in_flight *entry)
{
	if (entry->place != FDMAP_PLACE_NOWHERE)
		record(entry->id, entry->offset, entry->length);
	forget(host, thread, entry);
}

#endif
