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

/* Key: pid_tgid of the calling thread. */
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

/* The class of the system call with this number; FDMAP_CALL_NONE for nearly all. */
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

/* True if io_submit may write to a followed file, also if its requests cannot be read. */
static __always_inline bool submits_a_write(struct pt_regs *regs, bool compat)
{
	__u64 requests = regs->si, *pointers = (void *)regs->dx;

	if (compat || requests > MAX_REQUESTS)
		return true;
	for (__u32 i = 0; i < MAX_REQUESTS && i < requests; i++) {
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

/* Counts a call whose range is unknown. Returns false for all other calls. */
static __always_inline bool count_rangeless(struct fdmap_write_control *host, struct pt_regs *regs, __u32 call, bool compat)
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
		/* 32-bit calls pass the third argument in dx as well. */
		if (regs->dx == MADV_REMOVE)
			count(&host->removals);
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
	/* The service polls the ring buffer, so no wake-up is needed. */
	bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
	count(&file->records);
}

static __always_inline void record_everything(__u64 id)
{
	record(id, 0, FDMAP_TO_THE_END);
}

/* Removes the entry of the calling thread, after its record was submitted: at any time a write is in flight or recorded. */
static __always_inline void remove_entry(struct fdmap_write_control *host, __u64 thread, struct fdmap_write_in_flight *entry)
{
	struct fdmap_followed_file *file = file_of(entry->write.id);

	if (file && entry->moving)
		count(&file->moves_ended);
	bpf_map_delete_elem(&in_flight, &thread);
	if (file)
		count(&file->ended);
	count(&host->ended);
}

/* The result of the call is unknown: record all that it could have written. */
static __always_inline void end_without_result(struct fdmap_write_control *host, __u64 thread,
					       struct fdmap_write_in_flight *entry)
{
	if (entry->place != FDMAP_PLACE_NOWHERE)
		record(entry->write.id, entry->write.offset, entry->write.length);
	remove_entry(host, thread, entry);
}

#endif
