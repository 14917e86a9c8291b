// SPDX-License-Identifier: (GPL-2.0-only OR MIT)
/*
 * Which bytes of followed files are written through descriptors, by system calls of whatever process: a call is remembered
 * when it begins, and its range is recorded when it ends. What cannot be told exactly is recorded as more, never as less.
 *
 * The programs hang on every system call of the host. So the number of the call is looked at first, then whether its
 * descriptor is of a followed file, and for all others that is all.
 *
 * Not seen here: writes that no system call makes with a descriptor of the file. Of these io_uring requests,
 * truncate() and MADV_REMOVE are counted for the whole host, and io_submit where it may write to any followed file; loop devices and the kernel's own writers are not even that.
 * Neither are those of a thread whose descriptor, or request of io_submit, another thread replaces twice during the call.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "file_writes.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";

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
 *
 * Only descriptors that were opened by path wait: on one of memfd_create() two writes, and reads as well, may set the
 * position back at any time.
 */
static __always_inline void at_position(struct fdmap_write_in_flight *entry, struct fdmap_followed_file *followed,
					struct file___of_descriptor *file)
{
	unsigned int mode = 0;

	if (bpf_core_read(&mode, sizeof(mode), &file->f_mode) || !(mode & FMODE_ATOMIC_POS))
		return;
	entry->moves = now_at(&followed->moves_begun);
	if (entry->moves - now_at(&followed->moves_ended) != entry->moving ||
	    !read_word(&entry->start, &file->f_pos))
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
	__u64 thread, target, source;

	/* Whatever opens is looked at when it has opened. */
	if (!call || (call >= FDMAP_CALL_OPEN && call <= FDMAP_CALL_OPENAT2))
		return 0;
	host = the_control();
	if (!host || !host->followed)
		return 0;
	if (count_unseen(host, regs, call, compat))
		return 0;
	if (call == FDMAP_CALL_MMAP || call == FDMAP_CALL_OLD_MMAP) {
		count_mapping(regs, call, compat);
		return 0;
	}
	entry.descriptor = descriptor_of(regs, call, compat);
	file = open_file(entry.descriptor);
	target = id_of(file);
	source = source_of(regs, call, compat);
	entry.id = target ? target : source;
	if (!entry.id)
		return 0;
	followed = file_of(entry.id);
	if (!followed)
		return 0;
	if (target && source && source != target) {
		/* There is one entry for a thread: of the other file no position is relied on any more. */
		struct fdmap_followed_file *other = file_of(source);

		if (other)
			count(&other->moves_begun);
	}
	entry.file = (__u64)file;
	entry.moving = call == FDMAP_CALL_LSEEK || call == FDMAP_CALL_SENDFILE || source == entry.id ||
		       (call == FDMAP_CALL_SPLICE && !regs->r10);
	if (entry.moving)
		count(&followed->moves_begun);
	asked(&entry, 0, FDMAP_TO_THE_END);
	if (!target || call == FDMAP_CALL_LSEEK)
		entry.place = FDMAP_PLACE_NOWHERE;
	else if (!compat)
		find_place(&entry, followed, file, regs, call);

	thread = bpf_get_current_pid_tgid();
	count(&followed->begun);
	count(&host->begun);
	if (!bpf_map_update_elem(&in_flight, &thread, &entry, BPF_NOEXIST))
		return 0;
	/* There may be one that has never come to its end. */
	left = bpf_map_lookup_elem(&in_flight, &thread);
	if (left)
		end_without_result(host, thread, left);
	if (bpf_map_update_elem(&in_flight, &thread, &entry, BPF_NOEXIST)) {
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
		if (result > 0 && read_word(&now, &file->f_pos) && now >= entry->start + written &&
		    now_at(&followed->moves_begun) == entry->moves) {
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

/* A call may have set a position of the file back of which no entry was made. */
static __always_inline void moved(__u64 id)
{
	struct fdmap_followed_file *followed = id ? file_of(id) : NULL;

	if (followed) {
		count(&followed->moves_begun);
		count(&followed->moves_ended);
	}
}

SEC("tp_btf/sys_exit")
int on_exit(__u64 *ctx)
{
	struct pt_regs *regs = (void *)ctx[0];
	struct fdmap_write_in_flight *entry = NULL;
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
	if (count_unseen(host, regs, call, compat))
		return 0;
	if (call == FDMAP_CALL_MMAP || call == FDMAP_CALL_OLD_MMAP) {
		count_mapping(regs, call, compat);
		return 0;
	}
	if (call >= FDMAP_CALL_OPEN && call <= FDMAP_CALL_OPENAT2) {
		end_of_open(regs, call, compat, result);
		return 0;
	}
	if (any_in_flight(host)) {
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
	if (id && call != FDMAP_CALL_LSEEK)
		record_everything(id);
	moved(id);
	moved(source_of(regs, call, compat));
	return 0;
}

/* A thread that ends in the middle of a call never comes to its end. */
SEC("tp_btf/sched_process_exit")
int on_thread_exit(__u64 *ctx)
{
	struct fdmap_write_control *host = the_control();
	struct fdmap_write_in_flight *entry;
	__u64 thread;

	if (!host || !any_in_flight(host))
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
	case 25: /* MADVISE */
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
	if (!read_word(&key, &file->f_inode) || !key)
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
	if (!read_word(&key, &file->f_inode) || !key)
		return FDMAP_STATUS_FAULT;
	return bpf_map_delete_elem(&followed, &key) ? FDMAP_STATUS_TWICE : FDMAP_STATUS_OK;
}
