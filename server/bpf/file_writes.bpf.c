// SPDX-License-Identifier: (GPL-2.0-only OR MIT)
/*
 * Records the byte ranges of followed files that any process writes by system calls on descriptors. A call is in the map
 * in_flight from its entry to its exit, and its range is recorded at its exit. A range that is not known exactly is recorded as
 * a larger range, never as a smaller one.
 *
 * The programs run at every system call of the host. They first check the number of the call, then whether its descriptor
 * refers to a followed file, and return at once for all other calls.
 *
 * Of writes that are not made by a system call on a descriptor of the file, the programs record MADV_REMOVE (mapping_calls.h).
 * io_uring requests and calls that attach a file to a device are counted for their file. Threads that truncate a file by its path,
 * or write to a file of a stacked file system, are noted: a followed file may have been meant. Calls on a file of FUSE with
 * passthrough are calls on the file behind it. Writes by the kernel itself are not observed. Neither are the writes of a thread if
 * another thread replaces its descriptor, its io_submit request, or its ranges of process_madvise, twice during the call.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "device_calls.h"
#include "file_writes.h"
#include "mapping_calls.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";

static __always_inline void set_requested(struct fdmap_write_in_flight *entry, __u64 offset, __u64 length)
{
	entry->place = FDMAP_PLACE_REQUESTED;
	entry->write.offset = offset;
	entry->write.length = length;
}

/* The size of a file in bytes. */
static __always_inline __u64 size_of(struct file___of_descriptor *file)
{
	struct inode *inode = NULL;
	long long size = 0;

	if (bpf_core_read(&inode, sizeof(inode), &file->f_inode) || bpf_core_read(&size, sizeof(size), &inode->i_size))
		return 0;
	return size;
}

static __always_inline void set_offset(struct fdmap_write_in_flight *entry, struct file___of_descriptor *file, __u64 offset,
				       __u64 length)
{
	entry->place = FDMAP_PLACE_OFFSET;
	entry->start = size_of(file);
	entry->write.offset = offset;
	entry->write.length = length < MAX_WRITE_BYTES ? length : MAX_WRITE_BYTES;
}

/*
 * The call writes at the file position, which may move before the call writes. Writes hold the position lock and only advance
 * the position, so the written range lies between the position at entry and the position at exit. Exceptions are calls that move
 * the position backwards (lseek) or do not take the lock (sendfile, splice): if one of them overlaps, the range is unknown. So
 * moves_begun is read before the position here, and after the position at exit.
 *
 * Only descriptors that were opened by path take the lock. On a descriptor of memfd_create() two concurrent calls, also reads,
 * can move the position backwards at any time.
 */
static __always_inline void set_position(struct fdmap_write_in_flight *entry, struct fdmap_followed_file *followed,
					struct file___of_descriptor *file)
{
	struct fdmap_write_control *host = the_control();
	unsigned int mode = 0;

	if (!host || read_counter(&host->unknown_moves) || bpf_core_read(&mode, sizeof(mode), &file->f_mode) || !(mode & FMODE_ATOMIC_POS))
		return;
	entry->moves = read_counter(&followed->moves_begun);
	if (entry->moves - read_counter(&followed->moves_ended) != entry->moving ||
	    !read_word(&entry->start, &file->f_pos))
		return;
	entry->place = FDMAP_PLACE_POSITION;
}

/* Determines what the call will write. The default is everything. */
static __always_inline void find_place(struct fdmap_write_in_flight *entry, struct fdmap_followed_file *followed,
				       struct file___of_descriptor *file, struct pt_regs *regs, __u32 call)
{
	unsigned int flags = 0;

	switch (call) {
	case FDMAP_CALL_FALLOCATE:
		if (!(regs->si & ~(__u64)FALLOC_FL_KEEP_SIZE))
			entry->place = FDMAP_PLACE_INODE;
		else if (!(regs->si & MOVES_CONTENT))
			set_requested(entry, regs->dx, regs->r10);
		return;
	case FDMAP_CALL_FTRUNCATE:
		set_requested(entry, regs->si, FDMAP_TO_THE_END);
		return;
	case FDMAP_CALL_IOCTL:
		if (effect_of(regs->si) == IOCTL_ALLOCATES)
			entry->place = FDMAP_PLACE_INODE;
		return;
	case FDMAP_CALL_IO_SUBMIT:
		return;
	}
	/* The end of the file may move before the call writes. */
	if (bpf_core_read(&flags, sizeof(flags), &file->f_flags) || flags & O_APPEND)
		return;
	switch (call) {
	case FDMAP_CALL_PWRITE:
		set_offset(entry, file, regs->r10, regs->dx);
		return;
	case FDMAP_CALL_PWRITEV2:
		if ((is_x32(regs) ? regs->r8 : regs->r9) & RWF_APPEND)
			return;
		if (regs->r10 == ~0UL) {
			set_position(entry, followed, file);
			return;
		}
		set_offset(entry, file, regs->r10, MAX_WRITE_BYTES);
		return;
	case FDMAP_CALL_PWRITEV:
		set_offset(entry, file, regs->r10, MAX_WRITE_BYTES);
		return;
	case FDMAP_CALL_SPLICE:
		/* An offset in memory is not read: another thread can change it meanwhile. */
		if (!regs->r10)
			set_position(entry, followed, file);
		return;
	default:
		set_position(entry, followed, file);
	}
}

/* True if a mapping of an open file can never be written to: without FMODE_WRITE, mmap clears VM_MAYWRITE. */
static __always_inline bool maps_read_only(struct file___of_descriptor *file)
{
	unsigned int mode = 0;

	return !bpf_core_read(&mode, sizeof(mode), &file->f_mode) && !(mode & FMODE_WRITE);
}

/* A call of mmap begins, or has ended, that may map any followed file. */
static __always_inline void count_mapping_of_any(struct fdmap_write_control *host, bool begins)
{
	if (begins)
		begin_call_on_any(MAPS_ANY);
	else
		count(&host->mappings);
}

/* Counts a call of mmap that may map a followed file writable, at its entry and at its exit, and adds its entry to in_flight or calls_on_any. */
static __always_inline void count_mapping(struct fdmap_write_control *host, struct pt_regs *regs, __u32 call, bool compat, bool begins)
{
	struct fdmap_followed_file *followed;
	__u32 arguments[6] = {};
	__u64 flags, id, file;
	__u32 descriptor;

	if (call == FDMAP_CALL_OLD_MMAP) {
		if (bpf_probe_read_user(arguments, sizeof(arguments), (void *)(__u64)(__u32)regs->bx)) {
			count_mapping_of_any(host, begins);
			return;
		}
		flags = arguments[3];
		descriptor = arguments[4];
	} else {
		flags = compat ? regs->si : regs->r10;
		descriptor = compat ? regs->di : regs->r8;
	}
	if (flags & MAP_ANONYMOUS)
		return;
	file = address_of_open_file(descriptor);
	id = written_id(file);
	if (is_stacked(id)) {
		if ((flags & MAP_TYPE) == MAP_PRIVATE)
			return;
		count(&host->stacked_mappings);
		if (id == TWICE_STACKED_FILE)
			count_mapping_of_any(host, begins);
		return;
	}
	followed = id ? file_of(id) : NULL;
	if (followed && !maps_read_only((void *)file)) {
		count(&followed->mapped);
		if (begins)
			begin_action(ACTION_BEGIN_MAPPING, id, 0, 0, 0);
	}
}

/* The flags of a call that opens a file; all that may be set if they are in memory. */
static __always_inline __u64 open_flags(struct pt_regs *regs, __u32 call, bool compat)
{
	if (call == FDMAP_CALL_OPEN)
		return compat ? regs->cx : regs->si;
	return call == FDMAP_CALL_OPENAT ? regs->dx : O_TRUNC;
}

/* The command of an ioctl. */
static __always_inline __u32 command_of(struct pt_regs *regs, bool compat)
{
	return compat ? regs->cx : regs->si;
}

/* The command of an ioctl of a device that attaches a file permanently; 0 for all other calls. */
static __always_inline __u32 permanent_command(struct pt_regs *regs, __u32 call, bool compat)
{
	__u32 command = command_of(regs, compat);

	if (call != FDMAP_CALL_IOCTL || !attaches_permanently(command))
		return 0;
	return is_device(address_of_open_file(descriptor_of(regs, call, compat))) ? command : 0;
}

/* Notes a call on a file of a stacked file system. Some raise an event for the named file alone. */
static __always_inline void note_call_on_stacked(struct fdmap_write_control *host, __u64 id, __u32 call, bool begins)
{
	bool is_silent = call == FDMAP_CALL_SPLICE || call == FDMAP_CALL_SENDFILE;

	if (call == FDMAP_CALL_LSEEK)
		return;
	/* Counted before its entry is removed: a reader finds the entry or the count. */
	if (is_silent)
		count(&host->stacked_silent);
	if (is_silent && id == TWICE_STACKED_FILE)
		note_unmatched(host, begins);
	else
		note_stacked(host, id, begins);
}

/* The id of the followed file that a call writes to by a descriptor, or 0. Notes calls on files of stacked file systems. */
static __always_inline __u64 target_of(struct fdmap_write_control *host, struct file___of_descriptor *file, __u32 call, bool begins)
{
	__u64 id = written_id((__u64)file);

	if (!is_stacked(id))
		return id;
	note_call_on_stacked(host, id, call, begins);
	return 0;
}

/* The argument of an ioctl. */
static __always_inline __u64 argument_of(struct pt_regs *regs, bool compat)
{
	return compat || is_x32(regs) ? (__u32)regs->dx : regs->dx;
}

/*
 * Counts calls whose range is unknown, when they begin and when they end. Returns false for the calls that need an entry in
 * in_flight.
 */
static __always_inline bool is_counted(struct fdmap_write_control *host, struct pt_regs *regs, __u32 call, bool compat, bool begins, bool failed)
{
	enum ioctl_effect effect;
	__u32 command;

	if (call == FDMAP_CALL_MMAP || call == FDMAP_CALL_OLD_MMAP) {
		count_mapping(host, regs, call, compat, begins);
		/* Counted before its entry is removed: a reader always finds the entry or the count. */
		if (!begins) {
			end_entries(host, bpf_get_current_pid_tgid(), 1);
			end_call_on_any(failed ? MAPS_ANY : NO_KIND);
		}
		return true;
	}
	if (call == FDMAP_CALL_IOCTL) {
		command = command_of(regs, compat);
		effect = effect_of(command);
		if (effect == IOCTL_ATTACHES)
			count_attachment(host, command, argument_of(regs, compat));
		return effect == IOCTL_NONE || (effect == IOCTL_ATTACHES && !attaches_permanently(command));
	}
	return count_rangeless(host, regs, call, begins);
}

SEC("tp_btf/sys_enter")
int on_enter(__u64 *ctx)
{
	struct pt_regs *regs = (void *)ctx[0];
	struct fdmap_write_in_flight entry = {};
	struct fdmap_followed_file *followed;
	struct fdmap_write_control *host;
	struct file___of_descriptor *file = NULL;
	bool compat = false;
	__u32 call = call_of(ctx[1], &compat), command;
	__u64 target, source = 0;

	if (!call)
		return 0;
	host = the_control();
	if (!host || !host->followed)
		return 0;
	if (call >= FDMAP_CALL_OPEN && call <= FDMAP_CALL_OPENAT2) {
		/* Which file is opened is known at the exit. */
		if (open_flags(regs, call, compat) & O_TRUNC)
			begin_call_on_any(WRITES_OTHER);
		return 0;
	}
	if (is_counted(host, regs, call, compat, true, false) || is_mapping_call(host, regs, call, compat, false, 0))
		return 0;
	command = permanent_command(regs, call, compat);
	if (call == FDMAP_CALL_IO_SUBMIT) {
		target = submitted_write(host, regs, compat, true);
	} else if (command) {
		target = attached_file(command, argument_of(regs, compat));
	} else {
		entry.descriptor = descriptor_of(regs, call, compat);
		file = open_file(entry.descriptor);
		target = target_of(host, file, call, true);
		source = source_of(regs, call, compat);
	}
	entry.write.id = target ? target : source;
	if (!entry.write.id)
		return 0;
	followed = file_of(entry.write.id);
	if (!followed)
		return 0;
	if (target && source && source != target) {
		/* A thread has only one entry. This count is never matched by moves_ended, so no position of the other file is
		 * trusted from now on. */
		struct fdmap_followed_file *other = file_of(source);

		if (other)
			count(&other->moves_begun);
	}
	entry.file = (__u64)file;
	entry.call = call;
	entry.moving = call == FDMAP_CALL_LSEEK || call == FDMAP_CALL_SENDFILE || source == entry.write.id ||
		       (call == FDMAP_CALL_SPLICE && !regs->r10);
	if (entry.moving)
		count(&followed->moves_begun);
	set_requested(&entry, 0, FDMAP_TO_THE_END);
	if (!target || call == FDMAP_CALL_LSEEK) {
		entry.place = FDMAP_PLACE_NOWHERE;
	} else if (command) {
		entry.place = FDMAP_PLACE_DEVICE;
		entry.start = command;
	} else if (!compat && id_of(file) == target) {
		find_place(&entry, followed, file, regs, call);
	}

	add_entry(host, followed, bpf_get_current_pid_tgid(), &entry);
	return 0;
}

/* True for results that the kernel returns before it writes anything. */
static __always_inline bool wrote_nothing(long result)
{
	return !result || result == -EPERM || result == -EBADF || result == -EINVAL || result == -EFBIG;
}

/* Records what the call wrote, from its result. */
static __always_inline void record_result(struct fdmap_write_control *host, struct fdmap_write_in_flight *entry, long result)
{
	struct file___of_descriptor *file = (void *)entry->file;
	struct fdmap_followed_file *followed = file_of(entry->write.id);
	__u64 written = result, now = 0;
	unsigned int flags = 0;

	switch (entry->place) {
	case FDMAP_PLACE_NOWHERE:
		return;
	case FDMAP_PLACE_INODE:
		record(entry->write.id, 0, 0);
		return;
	case FDMAP_PLACE_DEVICE:
		if (may_have_attached(entry->start, result))
			count_permanent_attachment(host, entry->write.id);
		return;
	case FDMAP_PLACE_REQUESTED:
		/* Some of these calls return 0 for success. */
		if (!result || !wrote_nothing(result))
			record(entry->write.id, entry->write.offset, entry->write.length);
		return;
	default:
		break;
	}
	if (wrote_nothing(result) || !followed)
		return;
	/* The descriptor may have been closed, and entry->file freed, during the call. */
	if (open_file(entry->descriptor) != file || bpf_core_read(&flags, sizeof(flags), &file->f_flags) ||
	    flags & O_APPEND) {
		record_everything(entry->write.id);
		return;
	}
	switch (entry->place) {
	case FDMAP_PLACE_OFFSET:
		/* Another thread may have set O_APPEND meanwhile, and cleared it again. */
		now = size_of(file);
		if (now > entry->start && (result < 0 || now > entry->write.offset + written))
			break;
		record(entry->write.id, entry->write.offset, result < 0 ? entry->write.length : written);
		return;
	case FDMAP_PLACE_POSITION:
		if (result > 0 && read_word(&now, &file->f_pos) && now >= entry->start + written &&
		    read_counter(&followed->moves_begun) == entry->moves && !read_counter(&host->unknown_moves)) {
			record(entry->write.id, entry->start, now - entry->start);
			return;
		}
		break;
	default:
		break;
	}
	record_everything(entry->write.id);
}

/* Handles the exit of a call that opens a file: with O_TRUNC it emptied the file as well. */
static __always_inline void end_of_open(struct fdmap_write_control *host, struct pt_regs *regs, __u32 call, bool compat, long result)
{
	bool stacked;
	__u64 id;

	if (!(open_flags(regs, call, compat) & O_TRUNC))
		return;
	if (result < 0) {
		/* It may have emptied the file before it failed. */
		end_other_write(false);
		return;
	}
	id = written_id(address_of_open_file(result));
	stacked = is_stacked(id);
	if (stacked)
		count(&host->stacked);
	/* Until the record is taken, the event of a followed file has no other explanation. */
	end_other_write(!id);
	if (id && !stacked)
		record_everything(id);
}

/* Counts a call without an entry that may have moved a position of the file backwards. */
static __always_inline void count_move(__u64 id)
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
	__u32 call = call_of(regs->orig_ax, &compat), command;
	long result = ctx[1];
	__u64 thread, id;

	if (!call)
		return 0;
	host = the_control();
	if (!host || !host->followed)
		return 0;
	if (call >= FDMAP_CALL_OPEN && call <= FDMAP_CALL_OPENAT2) {
		end_of_open(host, regs, call, compat, result);
		return 0;
	}
	if (is_counted(host, regs, call, compat, false, is_error(result)) || is_mapping_call(host, regs, call, compat, true, result))
		return 0;
	command = permanent_command(regs, call, compat);
	if (call == FDMAP_CALL_IO_SUBMIT) {
		id = submitted_write(host, regs, compat, false);
	} else if (command) {
		id = attached_file(command, argument_of(regs, compat));
	} else {
		id = target_of(host, open_file(descriptor_of(regs, call, compat)), call, false);
	}
	/* The descriptor may be that of another file than at the entry. */
	end_call_on_any(NO_KIND);
	if (any_in_flight(host)) {
		thread = bpf_get_current_pid_tgid();
		entry = bpf_map_lookup_elem(&in_flight, &thread);
		if (entry && entry->call != call) {
			/* The exit of that call was not observed: this result is not its own. */
			end_without_result(host, thread, entry);
			entry = NULL;
		}
	}
	/* Without an entry, the call may have begun before the file was followed. With one of another file, its descriptor was
	 * replaced. */
	if (id && (!entry || entry->write.id != id)) {
		if (!command && call != FDMAP_CALL_LSEEK)
			record_everything(id);
		if (command && may_have_attached(command, result))
			count_permanent_attachment(host, id);
		count_move(id);
	}
	if (entry) {
		record_result(host, entry, result);
		remove_entry(host, thread, entry);
		return 0;
	}
	count_move(source_of(regs, call, compat));
	return 0;
}

/* A thread that is killed during a call never reaches its exit. */
SEC("tp_btf/sched_process_exit")
int on_thread_exit(__u64 *ctx)
{
	struct fdmap_write_control *host = the_control();

	if (!host || !host->followed)
		return 0;
	end_entries(host, bpf_get_current_pid_tgid(), MAX_ENTRIES);
	end_call_on_any(NO_EXIT);
	return 0;
}

#define REQ_F_FIXED_FILE 1   /* IOSQE_FIXED_FILE */
#define REQ_F_CQE_SKIP (1 << 6) /* IOSQE_CQE_SKIP_SUCCESS */
#define SPLICE_F_FD_IN_FIXED (1U << 31)

enum request_effect {
	REQUEST_NONE,
	REQUEST_READS,
	REQUEST_WRITES,  /* to its file */
	REQUEST_SPLICES, /* from another file to its file */
	REQUEST_BY_PATH, /* may write to a file that it names by path */
	REQUEST_BY_ADDRESS, /* may punch a hole into a file that is mapped at an address, without an event */
};

/* By the numbers of the operations in linux/io_uring.h. All newer operations may write. */
static __always_inline enum request_effect effect_of_request(__u32 operation)
{
	switch (operation) {
	case 1:  /* READV */
	case 4:  /* READ_FIXED */
	case 22: /* READ */
	case 60: /* READV_FIXED */
		return REQUEST_READS;
	case 2:  /* WRITEV */
	case 5:  /* WRITE_FIXED */
	case 17: /* FALLOCATE */
	case 23: /* WRITE */
	case 46: /* URING_CMD */
	case 55: /* FTRUNCATE */
	case 61: /* WRITEV_FIXED */
		return REQUEST_WRITES;
	case 30: /* SPLICE */
		return REQUEST_SPLICES;
	case 18: /* OPENAT */
	case 28: /* OPENAT2 */
		return REQUEST_BY_PATH;
	case 25: /* MADVISE */
		return REQUEST_BY_ADDRESS;
	default:
		return operation > 62 ? REQUEST_WRITES : REQUEST_NONE;
	}
}

/* False before 6.13: the table of registered files has another layout. */
static __always_inline bool knows_registered_files(void)
{
	return bpf_core_field_exists(struct io_rsrc_data, nodes) && bpf_core_field_exists(struct io_rsrc_node, file_ptr);
}

/* The open file behind a descriptor, or behind a number of a registered file, of a request that is being submitted; or NULL. */
static __always_inline struct file___of_descriptor *file_of_request(struct io_kiocb *request, __u32 number, bool registered)
{
	struct io_rsrc_node **nodes, *node = NULL;

	if (!registered)
		return open_file(number);
	if (!knows_registered_files())
		return NULL;
	nodes = BPF_CORE_READ(request, ctx, file_table.data.nodes);
	if (number >= BPF_CORE_READ(request, ctx, file_table.data.nr) ||
	    bpf_probe_read_kernel(&node, sizeof(node), nodes + number) || !node)
		return NULL;
	return (void *)(BPF_CORE_READ(node, file_ptr) & ~7UL);
}

/* The file of a request that is being submitted, or NULL. request->file is set later. */
static __always_inline struct file___of_descriptor *submitted_file(struct io_kiocb *request, __u64 flags)
{
	/* Before 5.19 the number of the descriptor is not in the request. */
	if (!bpf_core_field_exists(request->cqe))
		return NULL;
	return file_of_request(request, BPF_CORE_READ(request, cqe.fd), flags & REQ_F_FIXED_FILE);
}

/* Counts a move of the position of a followed file. It is never matched by moves_ended: the position is not trusted from now on. */
static __always_inline void count_unlocked_move(struct fdmap_write_control *host, struct file___of_descriptor *file, bool is_known)
{
	__u64 id = id_of(file);
	struct fdmap_followed_file *followed = id ? file_of(id) : NULL;

	if (!is_known)
		count(&host->unknown_moves);
	if (followed)
		count(&followed->moves_begun);
}

/* Counts what a request will do to file positions: it reads and sets them without their lock. */
static __always_inline void count_moves(struct fdmap_write_control *host, struct io_kiocb *request, __u64 flags, enum request_effect effect)
{
	struct file___of_descriptor *file = NULL;
	long long position = -1;
	bool registered = true;

	if (effect == REQUEST_SPLICES) {
		if (bpf_core_type_exists(struct io_splice)) {
			registered = BPF_CORE_READ((struct io_splice *)request, flags) & SPLICE_F_FD_IN_FIXED;
			file = file_of_request(request, BPF_CORE_READ((struct io_splice *)request, splice_fd_in), registered);
		}
		count_unlocked_move(host, file,
				    bpf_core_type_exists(struct io_splice) && (!registered || knows_registered_files()));
	} else {
		bpf_core_read(&position, sizeof(position), &((struct kiocb *)request)->ki_pos);
		if (position != -1)
			return;
	}
	count_unlocked_move(host, submitted_file(request, flags),
			    bpf_core_field_exists(request->cqe) && (!(flags & REQ_F_FIXED_FILE) || knows_registered_files()));
}

/* Counts a request when it begins and when it ends. Returns false if it ends and none was in progress. */
static __always_inline bool count_request_in(__u64 *begun, __u64 *ended, bool begins)
{
	if (!begins && read_counter(begun) <= read_counter(ended))
		return false;
	count(begins ? begun : ended);
	return true;
}

/* Removes the entry of a request that has ended, after it was counted. */
static __always_inline void end_request_on_any(struct fdmap_write_control *host, __u64 request)
{
	__u8 *entry, kind;

	if (!may_be_in_progress(&host->writes_begun, &host->writes_ended) &&
	    !may_be_in_progress(&host->others_begun, &host->others_ended))
		return;
	entry = bpf_map_lookup_elem(&requests_on_any, &request);
	if (!entry)
		return;
	kind = *entry;
	/* Another request at the address may have begun or ended: the end of this one was not observed. */
	if (kind == WRITES_ANY)
		count(&host->unmatched);
	else
		note_other_writer();
	if (kind == WRITES_OTHER)
		count(&host->paths);
	if (kind == WRITES_STACKED) {
		count(&host->stacked);
		count(&host->stacked_silent);
	}
	if (!bpf_map_delete_elem(&requests_on_any, &request))
		count(ended_of(host, kind));
}

/* A request begins that may concern any followed file. It is in progress until its end, or that of another one at its address, is
 * observed. Without room for its entry it counts as one without a completion event, which has none. */
static __always_inline void begin_request_on_any(struct fdmap_write_control *host, __u64 request, __u64 flags, __u8 kind)
{
	if (flags & REQ_F_CQE_SKIP)
		return;
	count(begun_of(host, kind));
	if (bpf_map_update_elem(&requests_on_any, &request, &kind, BPF_NOEXIST)) {
		count(&host->skipped);
		count(ended_of(host, kind));
	}
}

/* A request begins, or has ended, that may write to any followed file. */
static __always_inline void note_unmatched_request(struct fdmap_write_control *host, __u64 request, __u64 flags, bool begins)
{
	count(&host->unmatched);
	if (begins)
		begin_request_on_any(host, request, flags, WRITES_ANY);
}

/* A request begins, or has ended, that may write to a followed file without naming it. */
static __always_inline void note_other_request(struct fdmap_write_control *host, __u64 request, __u64 flags, __u8 kind, bool begins)
{
	/* Its entry in calls_on_any would be that of the thread that submits it. */
	note_other_writer();
	if (begins)
		begin_request_on_any(host, request, flags, kind);
}

/* True for an OPENAT request that truncates its file, or may. */
static __always_inline bool may_truncate(struct io_kiocb *request)
{
	return !bpf_core_type_exists(struct io_open) || BPF_CORE_READ((struct io_open *)request, how.flags) & O_TRUNC;
}

/* Counts a request. `has_entry`: it ends, and has an entry in requests_on_any: when it began, its file was not known. */
static __always_inline void count_request(__u64 address, bool begins, bool has_entry)
{
	struct fdmap_write_control *host = the_control();
	struct io_kiocb *request = (void *)address;
	struct fdmap_followed_file *followed;
	struct file___of_descriptor *file;
	enum request_effect effect;
	unsigned char operation = 0;
	unsigned int mode = FMODE_WRITE;
	__u64 flags, id;

	if (!host || !request)
		return;
	if (bpf_core_read(&operation, sizeof(operation), &request->opcode)) {
		count(&host->unmatched);
		return;
	}
	effect = effect_of_request(operation);
	if (effect == REQUEST_NONE)
		return;
	flags = BPF_CORE_READ(request, flags);
	if (begins && effect != REQUEST_READS && flags & REQ_F_CQE_SKIP)
		count(&host->skipped);
	if (!host->followed)
		return;
	if (effect == REQUEST_BY_ADDRESS) {
		note_unmatched_request(host, address, flags, begins);
		return;
	}
	if (effect == REQUEST_BY_PATH) {
		if (!may_truncate(request))
			return;
		count(&host->paths);
		note_other_request(host, address, flags, WRITES_OTHER, begins);
		return;
	}
	if (begins)
		count_moves(host, request, flags, effect);
	if (effect == REQUEST_READS)
		return;
	file = begins ? submitted_file(request, flags) : BPF_CORE_READ(request, file);
	if (!file) {
		note_unmatched_request(host, address, flags, begins);
		return;
	}
	id = written_id((__u64)file);
	if (is_stacked(id)) {
		count(&host->stacked);
		count(&host->stacked_silent);
		if (id == TWICE_STACKED_FILE)
			note_unmatched_request(host, address, flags, begins);
		else
			note_other_request(host, address, flags, WRITES_STACKED, begins);
		return;
	}
	followed = id ? file_of(id) : NULL;
	/* The kernel refuses to write by such a descriptor. It may issue the request with another one. */
	if (followed && (bpf_core_read(&mode, sizeof(mode), &file->f_mode) || !(mode & FMODE_WRITE)))
		return;
	if (followed && (has_entry || !count_request_in(&followed->requests_begun, &followed->requests_ended, begins)))
		/* It began before the file was followed, or its file was not known. */
		count(&followed->lost);
}

/* Attached also while no file is followed. */
SEC("tp_btf/io_uring_submit_req")
int observe_request(__u64 *ctx)
{
	struct fdmap_write_control *host = the_control();

	/* The kernel has given the address of another request to this one. */
	if (host && host->followed)
		end_request_on_any(host, ctx[0]);
	count_request(ctx[0], true, false);
	return 0;
}

SEC("tp_btf/io_uring_complete")
int on_completion(__u64 *ctx)
{
	struct fdmap_write_control *host = the_control();
	__u64 request = ctx[1];

	count_request(request, false, bpf_map_lookup_elem(&requests_on_any, &request));
	if (host && host->followed)
		end_request_on_any(host, request);
	return 0;
}

/* A request is canceled because the one before it failed. It has no completion event if that one was to have none. */
SEC("tp_btf/io_uring_fail_link")
int on_canceled_request(__u64 *ctx)
{
	struct fdmap_write_control *host = the_control();

	if (host && host->followed)
		end_request_on_any(host, ctx[1]);
	return 0;
}

/* linux/sched.h: IO workers, user workers and kernel threads. Some have copies of their creator's registers. */
#define PF_IO_WORKER 0x10
#define PF_USER_WORKER 0x4000
#define PF_KTHREAD 0x200000
#define TASK_STOPPED 4
#define TASK_TRACED 8
#define MAX_DESCRIPTORS 0x7fffffc0 /* sysctl_nr_open_max of fs/file.c: no descriptor has this number or a higher one */

/*
 * True if the call may write to a followed file, or map one. Sets the descriptor that it names, if it does. Calls that name no file
 * and raise an event when they end (truncate, open) are not included.
 */
static __always_inline bool may_change(struct pt_regs *regs, __u32 call, bool compat, bool *is_named, __u32 *descriptor)
{
	enum ioctl_effect effect;

	*is_named = false;
	switch (call) {
	case FDMAP_CALL_NONE:
	case FDMAP_CALL_LSEEK:
	case FDMAP_CALL_OPEN:
	case FDMAP_CALL_OPENAT:
	case FDMAP_CALL_OPENAT2:
	case FDMAP_CALL_TRUNCATE:
		return false;
	case FDMAP_CALL_OLD_MMAP:
	case FDMAP_CALL_IO_SUBMIT:
	case FDMAP_CALL_MREMAP:
	case FDMAP_CALL_REMAP_FILE_PAGES:
	case FDMAP_CALL_SHMAT:
		return true;
	case FDMAP_CALL_IPC:
		return (regs->bx & 0xffff) == SHMAT;
	case FDMAP_CALL_MADVISE:
	case FDMAP_CALL_PROCESS_MADVISE:
		return is_removal(regs, call, compat);
	case FDMAP_CALL_MMAP:
		*is_named = true;
		*descriptor = compat ? regs->di : regs->r8;
		return !((compat ? regs->si : regs->r10) & MAP_ANONYMOUS);
	case FDMAP_CALL_IOCTL:
		effect = effect_of(command_of(regs, compat));
		*is_named = effect != IOCTL_ATTACHES;
		*descriptor = descriptor_of(regs, call, compat);
		return effect != IOCTL_NONE;
	default:
		*is_named = true;
		*descriptor = descriptor_of(regs, call, compat);
		return true;
	}
}

/*
 * The id of the followed file behind a descriptor of a task, or 0; FDMAP_ANY_FILE if the descriptor was closed during the call. Sets
 * `stacked` for a file of a stacked file system.
 */
static __always_inline __u64 id_of_descriptor(struct task_struct___calling *task, __u32 descriptor, bool *stacked)
{
	struct fdtable___of_task *table = BPF_CORE_READ(task, files, fdt);
	struct file___of_descriptor **files = BPF_CORE_READ(table, fd);
	__u64 file = 0, id;

	/* A task that exits has no table. */
	if (descriptor >= MAX_DESCRIPTORS || !table)
		return 0;
	/* The call may not have looked it up yet. */
	if (descriptor >= BPF_CORE_READ(table, max_fds) || !read_word(&file, files + descriptor) || !file)
		return FDMAP_ANY_FILE;
	id = written_id(file);
	*stacked = id == STACKED_FILE;
	return *stacked ? 0 : id == TWICE_STACKED_FILE ? FDMAP_ANY_FILE : id;
}

/* True if the task may have io_uring requests in progress. The kernel removes a ring from `xa` when it was closed, and all its requests
 * have ended. */
static __always_inline bool may_have_requests(struct task_struct___calling *task)
{
	struct io_uring_task *used;
	void *rings = NULL;

	if (!bpf_core_field_exists(task->io_uring))
		return false;
	used = task->io_uring;
	if (!used)
		return false;
	/* An SQPOLL thread serves rings that other tasks made. */
	if (task->flags & (PF_IO_WORKER | PF_USER_WORKER))
		return true;
	return !bpf_core_field_exists(used->xa) || bpf_core_read(&rings, sizeof(rings), &used->xa.xa_head) || rings;
}

/*
 * Counts the tasks that are in a call which may map or write to a followed file. Run on demand, to find calls that began before
 * a file was followed, and calls for which there was no room. The registers of a task that is not in a system call are those of
 * its last entry to the kernel: a task may be counted after its call, until it enters the kernel again. A task stops before or
 * after its call.
 */
SEC("iter/task")
int find_calls(struct bpf_iter__task *ctx)
{
	struct task_struct___calling *task = ctx->task;
	struct fdmap_write_control *host = the_control();
	struct fdmap_followed_file *followed;
	__u32 call, descriptor = 0;
	struct pt_regs *regs;
	bool compat = false, is_named = false, stacked = false;
	__u64 id;

	if (!task || !host)
		return 0;
	if (may_have_requests(task) && task->start_time < host->observed_since)
		count(&host->earlier_rings);
	if (!task->mm || task->flags & (PF_IO_WORKER | PF_USER_WORKER | PF_KTHREAD) ||
	    task->__state & (TASK_STOPPED | TASK_TRACED))
		return 0;
	regs = (void *)bpf_task_pt_regs((void *)task);
	if (!regs)
		return 0;
	call = call_of_task(task, regs->orig_ax, &compat);
	if (!may_change(regs, call, compat, &is_named, &descriptor))
		return 0;
	id = is_named ? id_of_descriptor(task, descriptor, &stacked) : FDMAP_ANY_FILE;
	if (id == FDMAP_ANY_FILE) {
		count(&host->calling);
		return 0;
	}
	if (stacked)
		count(&host->calling_stacked);
	followed = id ? file_of(id) : NULL;
	if (followed)
		count(&followed->calling);
	return 0;
}

/* Arguments: descriptor of the service, id. Run on demand. Returns enum fdmap_status. */
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

/* Argument: descriptor of the service. Run on demand. Returns enum fdmap_status. */
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
