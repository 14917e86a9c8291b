// SPDX-License-Identifier: (GPL-2.0-only OR MIT)
/*
 * Which bytes of followed files are written through descriptors, by system calls of whatever process: a call is remembered
 * when it begins, and its range is recorded when it ends. What cannot be told exactly is recorded as more, never as less.
 *
 * The programs hang on every system call of the host. So the number of the call is looked at first, then whether its
 * descriptor is of a followed file, and for all others that is all.
 *
 * Not seen here: writes that no system call makes with a descriptor of the file. Of these io_uring requests, io_submit,
 * truncate() and MADV_REMOVE are counted for the whole host; loop devices and the kernel's own writers are not even that.
 * Neither are those of a thread whose descriptor another thread replaces twice during the call.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "kernel.h"
#include "write_record.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";

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
#define MOVES_CONTENT 0x28 /* FALLOC_FL_COLLAPSE_RANGE | FALLOC_FL_INSERT_RANGE */
#define MADV_REMOVE 9
#define MAP_ANONYMOUS 0x20
#define EPERM 1
#define EBADF 9
#define EEXIST 17
#define EINVAL 22
#define EFBIG 27
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
	struct file___of_descriptor *file = NULL;

	if (descriptor >= table->max_fds)
		return NULL;
	bpf_probe_read_kernel(&file, sizeof(file), table->fd + descriptor);
	return file;
}

/* Its id, if its file is followed; otherwise 0. */
static __always_inline __u64 id_of(struct file___of_descriptor *file)
{
	struct inode *inode = NULL;
	unsigned short mode = 0;
	__u64 key, *id;

	if (!file || bpf_core_read(&inode, sizeof(inode), &file->f_inode) ||
	    bpf_core_read(&mode, sizeof(mode), &inode->i_mode) || (mode & S_IFMT) != S_IFREG)
		return 0;
	key = (__u64)inode;
	id = bpf_map_lookup_elem(&followed, &key);
	return id ? *id : 0;
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

/* Counts a call whose file cannot be told; false if it is none. */
static __always_inline bool count_unseen(struct fdmap_write_control *host, struct pt_regs *regs, __u32 call)
{
	switch (call) {
	case FDMAP_CALL_IO_SUBMIT:
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

static __always_inline void asked(struct fdmap_write_in_flight *entry, __u64 offset, __u64 length)
{
	entry->place = FDMAP_PLACE_ASKED;
	entry->offset = offset;
	entry->length = length;
}

static __always_inline void at_offset(struct fdmap_write_in_flight *entry, __u64 offset, __u64 length)
{
	entry->place = FDMAP_PLACE_OFFSET;
	entry->offset = offset;
	entry->length = length < MOST ? length : MOST;
}

/*
 * At the descriptor's position, which may be another one when it comes to writing. Writes wait for one another and move it
 * on, so what they write lies between where it was when the call began and where it is when it ends; unless meanwhile
 * something was under way that sets it back (lseek), or that does not wait (sendfile, splice): then all that is known is
 * that it wrote. So the counter of such calls is read before the position here, and after it at the end.
 */
static __always_inline void at_position(struct fdmap_write_in_flight *entry, struct fdmap_followed_file *followed,
					struct file___of_descriptor *file)
{
	entry->moves = followed->moves_begun;
	if (entry->moves - followed->moves_ended != entry->moving ||
	    bpf_core_read(&entry->start, sizeof(entry->start), &file->f_pos))
		return;
	entry->place = FDMAP_PLACE_POSITION;
}

/* What the call is going to write. What is not set here is everything. */
static __always_inline void find_place(struct fdmap_write_in_flight *entry, struct fdmap_followed_file *followed,
				       struct file___of_descriptor *file, struct pt_regs *regs, __u32 call)
{
	unsigned int flags = 0;

	switch (call) {
	case FDMAP_CALL_FALLOCATE:
		if (!(regs->si & MOVES_CONTENT))
			asked(entry, regs->dx, regs->r10);
		return;
	case FDMAP_CALL_FTRUNCATE:
		asked(entry, regs->si, FDMAP_TO_THE_END);
		return;
	}
	/* Where the end of the file is when it comes to writing cannot be told. */
	if (bpf_core_read(&flags, sizeof(flags), &file->f_flags) || flags & O_APPEND)
		return;
	switch (call) {
	case FDMAP_CALL_PWRITE:
		at_offset(entry, regs->r10, regs->dx);
		return;
	case FDMAP_CALL_PWRITEV2:
		if (regs->r9 & RWF_APPEND)
			return;
		if (regs->r10 == ~0UL) {
			at_position(entry, followed, file);
			return;
		}
		at_offset(entry, regs->r10, MOST);
		return;
	case FDMAP_CALL_PWRITEV:
		at_offset(entry, regs->r10, MOST);
		return;
	case FDMAP_CALL_SPLICE:
		if (!regs->r10) {
			at_position(entry, followed, file);
			return;
		}
		entry->pointer = regs->r10;
		if (!bpf_probe_read_user(&entry->start, sizeof(entry->start), (void *)regs->r10))
			entry->place = FDMAP_PLACE_POINTER;
		return;
	default:
		at_position(entry, followed, file);
	}
}

/* A mapping is about to be made, or was made. */
static __always_inline void count_mapping(struct pt_regs *regs, __u32 call, bool compat)
{
	struct fdmap_followed_file *followed;
	__u32 arguments[6] = {};
	__u64 flags, id;
	__u32 descriptor;

	if (call == FDMAP_CALL_OLD_MMAP) {
		if (bpf_probe_read_user(arguments, sizeof(arguments), (void *)regs->bx))
			return;
		flags = arguments[3];
		descriptor = arguments[4];
	} else {
		flags = compat ? regs->si : regs->r10;
		descriptor = compat ? regs->di : regs->r8;
	}
	if (flags & MAP_ANONYMOUS)
		return;
	id = id_of(open_file(descriptor));
	followed = id ? file_of(id) : NULL;
	if (followed)
		count(&followed->mapped);
}

SEC("tp_btf/sys_enter")
int on_enter(__u64 *ctx)
{
	struct pt_regs *regs = (void *)ctx[0];
	struct fdmap_write_in_flight entry = {}, *left;
	struct fdmap_followed_file *followed;
	struct fdmap_write_control *host;
	struct file___of_descriptor *file;
	bool compat = false;
	__u32 call = call_of(ctx[1], &compat);
	__u64 thread;

	/* Whatever opens is looked at when it has opened. */
	if (!call || (call >= FDMAP_CALL_OPEN && call <= FDMAP_CALL_OPENAT2))
		return 0;
	host = the_control();
	if (!host || !host->followed)
		return 0;
	if (count_unseen(host, regs, call))
		return 0;
	if (call == FDMAP_CALL_MMAP || call == FDMAP_CALL_OLD_MMAP) {
		count_mapping(regs, call, compat);
		return 0;
	}
	entry.descriptor = descriptor_of(regs, call, compat);
	file = open_file(entry.descriptor);
	entry.id = id_of(file);
	if (!entry.id)
		return 0;
	followed = file_of(entry.id);
	if (!followed)
		return 0;
	thread = bpf_get_current_pid_tgid();
	/* One that has never come to its end. */
	left = bpf_map_lookup_elem(&in_flight, &thread);
	if (left)
		end_without_result(host, thread, left);

	entry.file = (__u64)file;
	entry.moving = call == FDMAP_CALL_LSEEK || call == FDMAP_CALL_SENDFILE ||
		       (call == FDMAP_CALL_SPLICE && !regs->r10);
	if (entry.moving)
		count(&followed->moves_begun);
	asked(&entry, 0, FDMAP_TO_THE_END);
	if (call == FDMAP_CALL_LSEEK)
		entry.place = FDMAP_PLACE_NOWHERE;
	else if (!compat)
		find_place(&entry, followed, file, regs, call);

	count(&followed->begun);
	count(&host->begun);
	if (bpf_map_update_elem(&in_flight, &thread, &entry, BPF_ANY)) {
		/* Its end will be taken for that of a call that began before the file was followed. */
		count(&followed->lost);
		if (entry.moving)
			count(&followed->moves_ended);
		count(&followed->ended);
		count(&host->ended);
	}
	return 0;
}

/* Errors that are found out before anything is written. */
static __always_inline bool wrote_nothing(long result)
{
	return !result || result == -EPERM || result == -EBADF || result == -EINVAL || result == -EFBIG;
}

/* Records what a call wrote that returned result. */
static __always_inline void end(struct fdmap_write_in_flight *entry, long result)
{
	struct file___of_descriptor *file = (void *)entry->file;
	struct fdmap_followed_file *followed = file_of(entry->id);
	__u64 written = result, now = 0;
	unsigned int flags = 0;

	switch (entry->place) {
	case FDMAP_PLACE_NOWHERE:
		return;
	case FDMAP_PLACE_ASKED:
		/* Some calls return 0 when they have done it. */
		if (!result || !wrote_nothing(result))
			record(entry->id, entry->offset, entry->length);
		return;
	}
	if (wrote_nothing(result) || !followed)
		return;
	/* The descriptor was closed meanwhile, and what was the file may be another one. */
	if (open_file(entry->descriptor) != file || bpf_core_read(&flags, sizeof(flags), &file->f_flags) ||
	    flags & O_APPEND) {
		record_everything(entry->id);
		return;
	}
	switch (entry->place) {
	case FDMAP_PLACE_OFFSET:
		record(entry->id, entry->offset, result < 0 ? entry->length : written);
		return;
	case FDMAP_PLACE_POSITION:
		if (result > 0 && !bpf_core_read(&now, sizeof(now), &file->f_pos) && now >= entry->start + written &&
		    followed->moves_begun == entry->moves) {
			record(entry->id, entry->start, now - entry->start);
			return;
		}
		break;
	case FDMAP_PLACE_POINTER:
		if (result > 0 && !bpf_probe_read_user(&now, sizeof(now), (void *)entry->pointer) &&
		    now == entry->start + written) {
			record(entry->id, entry->start, written);
			return;
		}
		break;
	}
	record_everything(entry->id);
}

/* A call has opened a descriptor; with O_TRUNC it has emptied the file as well. */
static __always_inline void end_of_open(struct pt_regs *regs, __u32 call, bool compat, long result)
{
	__u64 flags, id;

	if (call == FDMAP_CALL_OPEN)
		flags = compat ? regs->cx : regs->si;
	else if (call == FDMAP_CALL_OPENAT)
		flags = regs->dx;
	else
		flags = O_TRUNC;
	if (result < 0 || !(flags & O_TRUNC))
		return;
	id = id_of(open_file(result));
	if (id)
		record_everything(id);
}

SEC("tp_btf/sys_exit")
int on_exit(__u64 *ctx)
{
	struct pt_regs *regs = (void *)ctx[0];
	struct fdmap_write_in_flight *entry = NULL;
	struct fdmap_followed_file *followed;
	struct fdmap_write_control *host;
	bool compat = false;
	__u32 call = call_of(regs->orig_ax, &compat);
	long result = ctx[1];
	__u64 thread, id;

	if (!call)
		return 0;
	host = the_control();
	if (!host || !host->followed)
		return 0;
	if (count_unseen(host, regs, call))
		return 0;
	if (call == FDMAP_CALL_MMAP || call == FDMAP_CALL_OLD_MMAP) {
		count_mapping(regs, call, compat);
		return 0;
	}
	if (call >= FDMAP_CALL_OPEN && call <= FDMAP_CALL_OPENAT2) {
		end_of_open(regs, call, compat, result);
		return 0;
	}
	/* Our own entry counts among them. */
	if (host->begun != host->ended) {
		thread = bpf_get_current_pid_tgid();
		entry = bpf_map_lookup_elem(&in_flight, &thread);
	}
	if (entry) {
		end(entry, result);
		forget(host, thread, entry);
		return 0;
	}
	/* It may have begun before the file was followed. */
	id = id_of(open_file(descriptor_of(regs, call, compat)));
	followed = id ? file_of(id) : NULL;
	if (!followed)
		return 0;
	if (call == FDMAP_CALL_LSEEK) {
		count(&followed->moves_begun);
		count(&followed->moves_ended);
	} else {
		record_everything(id);
	}
	return 0;
}

/* A thread that ends in the middle of a call never comes to its end. */
SEC("tp_btf/sched_process_exit")
int on_thread_exit(__u64 *ctx)
{
	struct fdmap_write_control *host = the_control();
	struct fdmap_write_in_flight *entry;
	__u64 thread;

	if (!host || host->begun == host->ended)
		return 0;
	thread = bpf_get_current_pid_tgid();
	entry = bpf_map_lookup_elem(&in_flight, &thread);
	if (entry)
		end_without_result(host, thread, entry);
	return 0;
}

/* Operations of io_uring that may write to a file or empty it, by their numbers in linux/io_uring.h, and all that are newer
 * than this. */
static __always_inline bool may_write(__u32 operation)
{
	switch (operation) {
	case 2:  /* WRITEV */
	case 5:  /* WRITE_FIXED */
	case 17: /* FALLOCATE */
	case 18: /* OPENAT */
	case 23: /* WRITE */
	case 28: /* OPENAT2 */
	case 30: /* SPLICE */
	case 46: /* URING_CMD */
	case 55: /* FTRUNCATE */
	case 61: /* WRITEV_FIXED */
		return true;
	default:
		return operation > 62;
	}
}

static __always_inline void count_request(__u64 address)
{
	struct fdmap_write_control *host = the_control();
	struct io_kiocb *request = (void *)address;
	unsigned char operation = 0;

	if (!host || !host->followed || !request)
		return;
	if (bpf_core_read(&operation, sizeof(operation), &request->opcode) || may_write(operation))
		count(&host->io_uring);
}

SEC("tp_btf/io_uring_submit_req")
int on_request(__u64 *ctx)
{
	count_request(ctx[0]);
	return 0;
}

SEC("tp_btf/io_uring_complete")
int on_completion(__u64 *ctx)
{
	count_request(ctx[1]);
	return 0;
}

/* Arguments: descriptor, id. Run on demand by the service, of whose process the descriptor is. Gives FDMAP_STATUS_*. */
SEC("raw_tp")
int follow(struct bpf_raw_tracepoint_args *ctx)
{
	struct file___of_descriptor *file = open_file(ctx->args[0]);
	__u64 id = ctx->args[1], key = 0;
	long failed;

	if (!file)
		return FDMAP_STATUS_BAD_FD;
	if (bpf_core_read(&key, sizeof(key), &file->f_inode) || !key)
		return FDMAP_STATUS_FAULT;
	failed = bpf_map_update_elem(&followed, &key, &id, BPF_NOEXIST);
	if (failed)
		return failed == -EEXIST ? FDMAP_STATUS_TWICE : FDMAP_STATUS_FULL;
	return FDMAP_STATUS_OK;
}

/* Argument: descriptor. As follow. */
SEC("raw_tp")
int unfollow(struct bpf_raw_tracepoint_args *ctx)
{
	struct file___of_descriptor *file = open_file(ctx->args[0]);
	__u64 key = 0;

	if (!file)
		return FDMAP_STATUS_BAD_FD;
	if (bpf_core_read(&key, sizeof(key), &file->f_inode) || !key)
		return FDMAP_STATUS_FAULT;
	return bpf_map_delete_elem(&followed, &key) ? FDMAP_STATUS_TWICE : FDMAP_STATUS_OK;
}
