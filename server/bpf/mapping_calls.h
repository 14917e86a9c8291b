/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * System calls that name memory by its address. The file is that of the mapping at the address.
 *
 * mremap, remap_file_pages and shmat count in `mapped` of the file. While in progress they have an entry in in_flight or in
 * calls_on_any. The same holds for mmap.
 * madvise(MADV_REMOVE), and process_madvise of a process on itself, are writes of the removed range: one entry in in_flight for
 * each mapping in the range, and records at the end. Files are looked up at the entry of a call and again at its exit, because
 * another thread may replace a mapping meanwhile.
 *
 * bpf_find_vma only tries to take the lock of the address space. A call whose files cannot be determined counts for all followed
 * files; mremap and remap_file_pages, for those that the address space maps already: the service knows whether it does.
 */
#ifndef FDMAP_MAPPING_CALLS_H
#define FDMAP_MAPPING_CALLS_H

#include "file_writes.h"

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct vm_area_struct {
	unsigned long vm_start;
	unsigned long vm_end;
	unsigned long vm_pgoff;
	struct file *vm_file;
};
#pragma clang attribute pop

#define MADV_REMOVE 9
#define EBUSY 16
#define MAX_ERRNO 4095 /* linux/err.h */
#define SHMAT 21 /* linux/ipc.h */
#define PAGE_SHIFT 12
/* Lookups for one address range: its mappings, and further attempts where the address space was locked. */
#define MAX_LOOKUPS 12

/* What is done with each mapping in a range. */
enum mapping_action {
	ACTION_BEGIN_MAPPING, /* its file may get another mapping */
	ACTION_END_MAPPING,
	ACTION_END_REMAPPING, /* of a file that the address space mapped before */
	ACTION_BEGIN_REMOVAL,
	ACTION_END_REMOVAL,
};

/* The mapping at an address. */
struct found_mapping {
	__u64 address;
	__u64 end;    /* of the mapping; 0: not found */
	__u64 id;     /* of the followed file, or 0 */
	__u64 offset; /* of the address in the file, in bytes */
};

static long on_mapping(struct task_struct *task, struct vm_area_struct *vma, struct found_mapping *found)
{
	__u64 file = 0;

	if (!read_word(&file, &vma->vm_file))
		return 0;
	found->id = id_at(file);
	found->offset = found->address - vma->vm_start + ((__u64)vma->vm_pgoff << PAGE_SHIFT);
	found->end = vma->vm_end;
	return 0;
}

/*
 * Adds the removal of a range, or the mapping of its file, to the calls in flight, as the entry `nth` of the calling thread. Global,
 * so that the entry is not on the stack of its caller as well.
 */
__noinline int begin_action(__u32 action, __u64 id, __u64 offset, __u64 length, __u32 nth)
{
	struct fdmap_write_in_flight entry = {};
	struct fdmap_followed_file *followed = file_of(id);
	struct fdmap_write_control *host = the_control();

	entry.place = action == ACTION_BEGIN_REMOVAL ? FDMAP_PLACE_REQUESTED : FDMAP_PLACE_MAPPING;
	entry.write.id = id;
	entry.write.offset = offset;
	entry.write.length = length;
	if (host && followed)
		add_entry(host, followed, entry_key(bpf_get_current_pid_tgid(), nth), &entry);
	return 0;
}

/* A call has ended whose file was known when it began. */
__noinline int note_ended_remap(void)
{
	struct fdmap_write_control *host = the_control();

	if (!host)
		return 0;
	if (!note_remap(true) || !note_remap(false))
		count(&host->mappings);
	count(&host->remaps_begun);
	count(&host->remaps_ended);
	return 0;
}

/*
 * Performs the action for each mapping of a followed file in an address range; `nth`: the entries in in_flight that the calling
 * thread has already. Returns how many it has then. If not all mappings are found, the call counts for all files.
 */
__noinline int act_on_mappings(__u64 address, __u64 end, __u32 action, __u32 nth)
{
	struct task_struct *task = (void *)bpf_get_current_task_btf();
	struct fdmap_write_control *host = the_control();

	if (!host)
		return nth;
	for (int i = 0; i < MAX_LOOKUPS; i++) {
		struct found_mapping found = { .address = address };
		long failed = bpf_find_vma(task, address, on_mapping, &found, 0);
		struct fdmap_followed_file *followed;
		__u64 length;

		if (failed == -EBUSY)
			continue;
		if (failed || found.end <= address)
			break;
		length = (end < found.end ? end : found.end) - address;
		followed = found.id ? file_of(found.id) : NULL;
		if (followed && (action == ACTION_BEGIN_MAPPING || action == ACTION_END_MAPPING || action == ACTION_END_REMAPPING)) {
			count(&followed->mapped);
			count(&followed->remapped);
		}
		if (followed && action == ACTION_END_REMOVAL)
			record(found.id, found.offset, length);
		if (followed && (action == ACTION_BEGIN_REMOVAL || action == ACTION_BEGIN_MAPPING)) {
			if (nth >= MAX_ENTRIES)
				break;
			begin_action(action, found.id, found.offset, length, nth++);
		}
		if (found.end >= end)
			return nth;
		address = found.end;
	}
	if (action == ACTION_BEGIN_MAPPING)
		begin_call_on_any(REMAPS_ANY);
	else if (action == ACTION_END_REMAPPING)
		note_ended_remap();
	else if (action == ACTION_BEGIN_REMOVAL)
		begin_call_on_any(WRITES_ANY);
	else
		count(action == ACTION_END_MAPPING ? &host->mappings : &host->unmatched);
	return nth;
}

/* Calls of mremap and remap_file_pages, and the exit of shmat. */
static __always_inline void count_mappings(__u64 address, __u64 length, __u32 action)
{
	/* An old length of 0 makes a second mapping. A range that wraps around is refused by the kernel. */
	__u64 end = address + (length ? length : 1);

	act_on_mappings(address, end > address ? end : address + 1, action, 0);
}

/* madvise(MADV_REMOVE) of one range. The result is unused: a call that fails may have removed a part of its range. */
static __always_inline __u32 remove_range(__u64 address, __u64 length, bool at_exit, __u32 nth)
{
	__u64 end = address + ((length + (1 << PAGE_SHIFT) - 1) & ~((1ULL << PAGE_SHIFT) - 1));

	/* The kernel removes nothing. */
	if (end <= address)
		return nth;
	return act_on_mappings(address, end, at_exit ? ACTION_END_REMOVAL : ACTION_BEGIN_REMOVAL, nth);
}

/* process_madvise(MADV_REMOVE), which the kernel permits for the address space of the caller only. */
static __always_inline void remove_ranges(struct fdmap_write_control *host, __u64 vector, __u64 ranges, bool at_exit)
{
	struct { __u64 address, length; } range = {};
	__u32 nth = 0;

	if (ranges > MAX_ENTRIES) {
		note_unmatched(host, !at_exit);
		return;
	}
	for (__u32 i = 0; i < MAX_ENTRIES && i < ranges; i++) {
		if (bpf_probe_read_user(&range, sizeof(range), (void *)(vector + i * sizeof(range)))) {
			note_unmatched(host, !at_exit);
			return;
		}
		nth = remove_range(range.address, range.length, at_exit, nth);
	}
}

/* True for the results of calls that mapped nothing. */
static __always_inline bool is_error(long result)
{
	return (__u64)result >= (__u64)-MAX_ERRNO;
}

/* Counts a call that maps memory, at its entry and at its exit. Which segment shmat attaches is known at its exit. */
static __always_inline void count_mapping_call(struct fdmap_write_control *host, struct pt_regs *regs, __u32 call, bool compat,
					       bool at_exit, long result)
{
	__u64 address = compat ? (__u32)regs->bx : regs->di;
	__u64 length = compat ? (__u32)regs->cx : regs->si;
	bool failed = is_error(result);

	if (!at_exit && (call == FDMAP_CALL_SHMAT || call == FDMAP_CALL_IPC)) {
		begin_call_on_any(MAPS_SEGMENT);
		return;
	}
	if (at_exit && !failed) {
		if (call == FDMAP_CALL_MREMAP) {
			/* 32-bit calls pass the third argument in dx as well. */
			address = result;
			length = compat ? (__u32)regs->dx : regs->dx;
		} else if (call == FDMAP_CALL_SHMAT) {
			address = result;
			length = 1;
		}
	}
	if (at_exit && call == FDMAP_CALL_IPC && !failed)
		/* The address is in memory of the caller. */
		count(&host->mappings);
	else if (!at_exit)
		count_mappings(address, length, ACTION_BEGIN_MAPPING);
	else if (!failed)
		count_mappings(address, length, call == FDMAP_CALL_SHMAT ? ACTION_END_MAPPING : ACTION_END_REMAPPING);
	/* Counted before its entry is removed: a reader always finds the entry or the count. */
	if (at_exit) {
		end_entries(host, bpf_get_current_pid_tgid(), MAX_ENTRIES);
		end_call_on_any(failed ? MAPS_ANY : NO_KIND);
	}
}

/* True if madvise or process_madvise removes pages. The advice is an int: the kernel ignores the upper half of the register. */
static __always_inline bool is_removal(struct pt_regs *regs, __u32 call, bool compat)
{
	return (__u32)(call == FDMAP_CALL_MADVISE ? regs->dx : compat ? regs->si : regs->r10) == MADV_REMOVE;
}

/* Handles the entry or the exit of a call that names memory by its address. Returns false for all other calls. */
static __always_inline bool is_mapping_call(struct fdmap_write_control *host, struct pt_regs *regs, __u32 call, bool compat,
					    bool at_exit, long result)
{
	__u64 address = compat ? (__u32)regs->bx : regs->di;
	__u64 length = compat ? (__u32)regs->cx : regs->si;

	switch (call) {
	case FDMAP_CALL_IPC:
		if ((regs->bx & 0xffff) != SHMAT)
			return true;
		/* fall through */
	case FDMAP_CALL_MREMAP:
	case FDMAP_CALL_REMAP_FILE_PAGES:
	case FDMAP_CALL_SHMAT:
		count_mapping_call(host, regs, call, compat, at_exit, result);
		return true;
	case FDMAP_CALL_MADVISE:
	case FDMAP_CALL_PROCESS_MADVISE:
		break;
	default:
		return false;
	}
	if (!is_removal(regs, call, compat))
		return true;
	if (at_exit) {
		end_entries(host, bpf_get_current_pid_tgid(), MAX_ENTRIES);
		end_call_on_any(NO_KIND);
	}
	if (call == FDMAP_CALL_MADVISE)
		remove_range(address, length, at_exit, 0);
	else
		/* Ranges in the 32-bit format are not read. */
		remove_ranges(host, regs->si, compat || is_x32(regs) ? ~0ULL : regs->dx, at_exit);
	return true;
}

#endif
