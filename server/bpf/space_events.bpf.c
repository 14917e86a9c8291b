// SPDX-License-Identifier: (GPL-2.0-only OR MIT)
/*
 * Counts events of followed address spaces: calls that may take written bits, calls that may make a shared mapping writable, and
 * forks. Reports calls that install guard regions.
 *
 * Written bits are taken by ioctl on a pagemap or a userfaultfd of the address space, and moved away by mremap with
 * MREMAP_DONTUNMAP. An ioctl is judged by its command alone, never by its flags or its range: these are in user memory, and
 * another thread can change them after they were read here. The calls of the service itself, and of its holders, are not
 * counted.
 *
 * The programs run at every system call of the host. They first check the number of the call, then its command or flags, then
 * the file behind its descriptor, and return at once for all other calls.
 *
 * Not observed: ioctl by io_uring (IORING_OP_URING_CMD does not reach these files), and a call whose descriptor another thread
 * replaces twice during the call.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#include "kernel.h"
#include "space_record.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct pt_regs { /* x86-64; 32-bit calls pass their arguments in bx, cx, dx */
	unsigned long r10, bx, cx, dx, si, di, orig_ax;
};
struct thread_info___of_task {
	unsigned int status;
};
struct file___with_operations {
	void *f_op;
	void *private_data;
};
struct fdtable___with_operations {
	unsigned int max_fds;
	struct file___with_operations **fd;
};
struct files_struct___with_operations {
	struct fdtable___with_operations *fdt;
};
struct task_struct___of_space {
	struct thread_info___of_task thread_info;
	struct files_struct___with_operations *files;
	void *mm;
	int tgid;
	unsigned int flags;
	unsigned int __state;
};
struct userfaultfd_ctx {
	void *mm;
};
struct vm_area_struct {
	unsigned long vm_end;
	unsigned long vm_flags;
};
struct bpf_iter__task {
	struct task_struct___of_space *task;
};
#pragma clang attribute pop

#define TS_COMPAT 2 /* arch/x86/include/asm/thread_info.h */
#define EEXIST 17

/* Numbers of ioctl: of x86-64, of 32-bit calls, and of x32. */
#define NR_IOCTL 16
#define NR_IOCTL_COMPAT 54
#define NR_IOCTL_X32 514

/* Numbers of mremap. */
#define NR_MREMAP 25
#define NR_MREMAP_COMPAT 163
#define MREMAP_DONTUNMAP 4 /* linux/mman.h */

/* Numbers of madvise, and that of process_madvise, which is the same everywhere. */
#define NR_MADVISE 28
#define NR_MADVISE_COMPAT 219
#define NR_PROCESS_MADVISE 440
#define X32_BIT 0x40000000

/* Numbers of mprotect and pkey_mprotect, which have the same arguments. */
#define NR_MPROTECT 10
#define NR_MPROTECT_COMPAT 125
#define NR_PKEY_MPROTECT 329
#define NR_PKEY_MPROTECT_COMPAT 380
#define PROT_WRITE 2 /* asm-generic/mman-common.h */
#define VM_SHARED 8 /* linux/mm.h */
/* Mappings in the range of one mprotect call that are examined. */
#define MAX_MAPPINGS 8

#define MADV_GUARD_INSTALL 102 /* asm-generic/mman-common.h */
#define PAGE_MASK 4095

/* linux/fs.h, linux/userfaultfd.h */
#define PAGEMAP_SCAN 0xc0606610
#define UFFDIO_REGISTER 0xc020aa00
#define UFFDIO_UNREGISTER 0x8010aa01
#define UFFDIO_COPY 0xc028aa03
#define UFFDIO_ZEROPAGE 0xc020aa04
#define UFFDIO_MOVE 0xc028aa05
#define UFFDIO_WRITEPROTECT 0xc018aa06
#define UFFDIO_CONTINUE 0xc020aa07
#define UFFDIO_POISON 0xc020aa08

/* Entries of one address space in in_flight: further ones would take the room of others. */
#define MAX_ENTRIES_OF_SPACE 64
/* A slot that does not exist. */
#define NO_SLOT (~0U)
/* Any slot. */
#define ANY_SLOT (NO_SLOT - 1)
/* Added to the slot of an entry in in_flight: the call may make a mapping writable. */
#define PROTECTS (1U << 31)

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fdmap_space_control);
} space_control SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fdmap_space);
} space_slots SEC(".maps"); /* resized by the loader */

/* struct mm_struct -> index in space_slots. The service keeps a pagemap of each followed address space open, so the kernel cannot
 * free the mm_struct and reuse its address while it is a key. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, __u64);
	__type(value, __u32);
} followed_spaces SEC(".maps"); /* resized by the loader */

/* Counted calls in progress: pid_tgid of the calling thread -> index in space_slots, with PROTECTS. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, __u32);
} in_flight SEC(".maps");

/* Holders: their process ids in the initial pid namespace -> the service's name for each. The service deletes an entry before it
 * reaps the process, so that no other process has the id. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u64);
} holders SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} guard_records SEC(".maps"); /* resized by the loader */

static __always_inline struct fdmap_space_control *the_control(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&space_control, &zero);
}

/* True for the service and its holders. */
static __always_inline bool is_service(struct fdmap_space_control *host, __u32 process)
{
	return process == host->service || bpf_map_lookup_elem(&holders, &process);
}

static __always_inline void count(__u64 *counter)
{
	__sync_fetch_and_add(counter, 1);
}

static __always_inline __u64 read_counter(__u64 *counter)
{
	return *(volatile __u64 *)counter;
}

/* The slot of an address space; NO_SLOT if it is not followed. */
static __always_inline __u32 slot_of(__u64 mm)
{
	__u32 *slot = bpf_map_lookup_elem(&followed_spaces, &mm);

	return slot ? *slot : NO_SLOT;
}

/* The address of the open file behind a descriptor of a task, or 0. */
static __always_inline __u64 address_of_file(struct task_struct___of_space *task, __u32 descriptor)
{
	struct fdtable___with_operations *table = BPF_CORE_READ(task, files, fdt);
	struct file___with_operations **files = BPF_CORE_READ(table, fd);
	__u64 file = 0;

	if (descriptor >= BPF_CORE_READ(table, max_fds) || !read_word(&file, files + descriptor))
		return 0;
	return file;
}

__noinline __u64 address_of_open_file(__u32 descriptor)
{
	return address_of_file((void *)bpf_get_current_task(), descriptor);
}

/* The address space of the pagemap or userfaultfd whose open file is at an address; 0 for all other files. */
__noinline __u64 space_of_file(__u64 address)
{
	struct file___with_operations *file = (void *)address;
	struct fdmap_space_control *host = the_control();
	struct userfaultfd_ctx *context;
	__u64 operations;

	if (!file || !host)
		return 0;
	operations = (__u64)BPF_CORE_READ(file, f_op);
	if (operations == host->pagemap_ops)
		return (__u64)BPF_CORE_READ(file, private_data);
	if (operations != host->uffd_ops)
		return 0;
	context = BPF_CORE_READ(file, private_data);
	return (__u64)BPF_CORE_READ(context, mm);
}

static __always_inline __u64 space_of_descriptor(__u32 descriptor)
{
	return space_of_file(address_of_open_file(descriptor));
}

/* True for commands that can clear or set written bits, or end the registration of a range. */
static __always_inline bool takes_bits(__u32 command)
{
	switch (command) {
	case PAGEMAP_SCAN:
	case UFFDIO_REGISTER:
	case UFFDIO_UNREGISTER:
	case UFFDIO_COPY:
	case UFFDIO_ZEROPAGE:
	case UFFDIO_MOVE:
	case UFFDIO_WRITEPROTECT:
	case UFFDIO_CONTINUE:
	case UFFDIO_POISON:
		return true;
	default:
		return false;
	}
}

static __always_inline bool is_compat(void)
{
	struct task_struct___of_space *task = (void *)bpf_get_current_task();

	return BPF_CORE_READ(task, thread_info.status) & TS_COMPAT;
}

/*
 * True for the numbers of ioctl and mremap. As native calls, 54 and 163 are others. Here and below, a number has 32 bits: the
 * kernel ignores the upper half of the register.
 */
static __always_inline bool may_take(__u32 number, bool *compat)
{
	if (number == NR_IOCTL || number == NR_IOCTL_COMPAT || number == NR_MREMAP || number == NR_MREMAP_COMPAT) {
		*compat = is_compat();
		return *compat == (number == NR_IOCTL_COMPAT || number == NR_MREMAP_COMPAT);
	}
	return number == (X32_BIT | NR_IOCTL_X32) || number == (X32_BIT | NR_MREMAP);
}

/*
 * The slot of the address space whose written bits the call may take; NO_SLOT for all other calls, and for the service. mremap
 * with MREMAP_DONTUNMAP moves the page tables away: the pages that it leaves empty read as written.
 */
static __always_inline __u32 taken_slot(struct fdmap_space_control *host, struct pt_regs *regs, __u32 number, bool compat)
{
	struct task_struct___of_space *task = (void *)bpf_get_current_task();
	__u32 command = compat ? regs->cx : regs->si, descriptor = compat ? regs->bx : regs->di;
	__u64 mm;

	if ((number & ~X32_BIT) == NR_MREMAP || number == NR_MREMAP_COMPAT) {
		if (!((compat ? regs->si : regs->r10) & MREMAP_DONTUNMAP))
			return NO_SLOT;
		return slot_of((__u64)BPF_CORE_READ(task, mm));
	}
	if (!takes_bits(command) || is_service(host, bpf_get_current_pid_tgid() >> 32))
		return NO_SLOT;
	mm = space_of_descriptor(descriptor);
	return mm ? slot_of(mm) : NO_SLOT;
}

/* Removes the entry of a call that has ended, if there is one. */
static __always_inline bool end_call(struct fdmap_space_control *host)
{
	__u64 ended = read_counter(&host->ended), thread;
	struct fdmap_space *space;
	__u32 *entry, slot;
	bool protects;

	/* Read in this order, begun includes every call in progress and ended includes none of them. */
	if (read_counter(&host->begun) == ended)
		return false;
	thread = bpf_get_current_pid_tgid();
	entry = bpf_map_lookup_elem(&in_flight, &thread);
	if (!entry)
		return false;
	protects = *entry & PROTECTS;
	slot = *entry & ~PROTECTS;
	bpf_map_delete_elem(&in_flight, &thread);
	space = bpf_map_lookup_elem(&space_slots, &slot);
	if (space)
		count(protects ? &space->protect_ended : &space->ended);
	count(&host->ended);
	return true;
}

/*
 * Adds the entry of a call that begins. Without room for it, the call is counted in `uncounted`: it is in progress until
 * find_calls finds no such call.
 */
static __always_inline void begin_call(struct fdmap_space_control *host, __u32 slot, bool protects)
{
	__u32 entry = protects ? slot | PROTECTS : slot;
	__u64 thread = bpf_get_current_pid_tgid(), in_progress, ended;
	struct fdmap_space *space;

	/* The thread may have an entry whose exit was not observed. */
	end_call(host);
	space = bpf_map_lookup_elem(&space_slots, &slot);
	if (!space)
		return;
	/* Read in this order, the difference is not negative. */
	ended = read_counter(&space->ended) + read_counter(&space->protect_ended);
	in_progress = read_counter(&space->begun) + read_counter(&space->protect_begun) - ended;
	count(protects ? &space->protect_begun : &space->begun);
	count(&host->begun);
	if (in_progress < MAX_ENTRIES_OF_SPACE && !bpf_map_update_elem(&in_flight, &thread, &entry, BPF_NOEXIST))
		return;
	count(&space->uncounted);
	count(protects ? &space->protect_ended : &space->ended);
	count(&host->ended);
}

/* Counts a call that ends without an entry: it may have begun before the address space was followed. */
static __always_inline void count_ended(__u32 slot, bool protects)
{
	struct fdmap_space *space = bpf_map_lookup_elem(&space_slots, &slot);

	if (!space)
		return;
	count(protects ? &space->protect_begun : &space->begun);
	count(protects ? &space->protect_ended : &space->ended);
}

/* One mapping in the range of a call. */
struct protected_mapping {
	__u64 end;
	bool shared;
};

static long on_protected_mapping(struct task_struct *task, struct vm_area_struct *vma, struct protected_mapping *found)
{
	found->end = BPF_CORE_READ(vma, vm_end);
	found->shared = BPF_CORE_READ(vma, vm_flags) & VM_SHARED;
	return 0;
}

/* True if a mapping in a range of the calling process is shared, or may be. */
__noinline bool includes_shared(__u64 address, __u64 end)
{
	struct task_struct *task = (void *)bpf_get_current_task_btf();

	for (int i = 0; i < MAX_MAPPINGS && address < end; i++) {
		struct protected_mapping found = {};
		long failed = bpf_find_vma(task, address, on_protected_mapping, &found, 0);

		/* The address space may be locked, or the hole may be filled before the kernel looks. */
		if (failed || found.shared || found.end <= address)
			return true;
		address = found.end;
	}
	return address < end;
}

/* True for the numbers of mprotect and pkey_mprotect, and for unrelated calls that have these numbers in the other ABI. */
static __always_inline bool may_protect(__u32 number)
{
	number &= ~X32_BIT;
	return number == NR_MPROTECT || number == NR_MPROTECT_COMPAT || number == NR_PKEY_MPROTECT ||
	       number == NR_PKEY_MPROTECT_COMPAT;
}

/* True if a call with such a number is one that makes memory writable. */
static __always_inline bool makes_writable(struct pt_regs *regs, __u32 number, bool compat)
{
	number &= ~X32_BIT;
	return compat == (number == NR_MPROTECT_COMPAT || number == NR_PKEY_MPROTECT_COMPAT) && regs->dx & PROT_WRITE;
}

/* The slot of the address space in which the call may make a shared mapping writable; NO_SLOT for all other calls. */
static __always_inline __u32 protected_slot(struct pt_regs *regs, __u32 number)
{
	struct task_struct___of_space *task = (void *)bpf_get_current_task();
	bool compat = is_compat();
	__u64 start = compat ? (__u32)regs->bx : regs->di, length = compat ? (__u32)regs->cx : regs->si;
	__u32 slot;

	if (!makes_writable(regs, number, compat))
		return NO_SLOT;
	slot = slot_of((__u64)BPF_CORE_READ(task, mm));
	return slot != NO_SLOT && includes_shared(start, start + length) ? slot : NO_SLOT;
}

/* Wakes the service. It reads `unranged` after the records, so a call that is not reported because of the limit is noticed. */
static __always_inline void report_guard(__u32 slot, struct fdmap_space *space, __u64 start, __u64 length)
{
	struct fdmap_guard_record *record;

	if (read_counter(&space->guards) - read_counter(&space->guards_read) >= FDMAP_MAX_GUARDS)
		return;
	record = bpf_ringbuf_reserve(&guard_records, sizeof(*record), 0);
	if (!record)
		return;
	record->slot = slot;
	record->start = start;
	record->length = length;
	count(&space->guards);
	bpf_ringbuf_submit(record, BPF_RB_FORCE_WAKEUP);
}

/*
 * The kernel restarts madvise while it cannot install the guard region, and each restart is an event of its own. So a call of
 * madvise that is not reported will be. process_madvise repeats the attempt within the call, and its ranges are in user memory,
 * which another thread can change.
 */
static __always_inline void on_advice(struct pt_regs *regs, __u32 number)
{
	struct task_struct___of_space *task = (void *)bpf_get_current_task();
	bool compat = is_compat(), process = (number & ~X32_BIT) == NR_PROCESS_MADVISE;
	__u64 start = compat ? (__u32)regs->bx : regs->di, length = compat ? (__u32)regs->cx : regs->si;
	__u32 advice = process ? (compat ? regs->si : regs->r10) : regs->dx, slot;
	struct fdmap_space_control *host;
	struct fdmap_space *space;

	if (advice != MADV_GUARD_INSTALL)
		return;
	host = the_control();
	if (!host || !host->followed)
		return;
	slot = slot_of((__u64)BPF_CORE_READ(task, mm));
	space = slot == NO_SLOT ? NULL : bpf_map_lookup_elem(&space_slots, &slot);
	if (!space)
		return;
	if (process) {
		count(&space->unranged);
		report_guard(slot, space, 0, 0);
	} else if (length && !(start & PAGE_MASK)) {
		report_guard(slot, space, start, length);
	}
}

/* True for the numbers of madvise and process_madvise, and for unrelated calls that have these numbers in the other ABI. */
static __always_inline bool may_advise(__u32 number)
{
	return number == NR_MADVISE || number == NR_MADVISE_COMPAT || number == NR_PROCESS_MADVISE ||
	       number == (X32_BIT | NR_MADVISE) || number == (X32_BIT | NR_PROCESS_MADVISE);
}

SEC("tp_btf/sys_enter")
int on_enter(__u64 *ctx)
{
	bool compat = false, protects = may_protect(ctx[1]);
	struct pt_regs *regs = (void *)ctx[0];
	struct fdmap_space_control *host;
	__u32 slot;

	if (may_advise(ctx[1])) {
		on_advice(regs, ctx[1]);
		return 0;
	}
	if (!protects && !may_take(ctx[1], &compat))
		return 0;
	host = the_control();
	if (!host || !host->followed)
		return 0;
	slot = protects ? protected_slot(regs, ctx[1]) : taken_slot(host, regs, ctx[1], compat);
	if (slot != NO_SLOT)
		begin_call(host, slot, protects);
	return 0;
}

SEC("tp_btf/sys_exit")
int on_exit(__u64 *ctx)
{
	struct pt_regs *regs = (void *)ctx[0];
	struct fdmap_space_control *host;
	bool compat = false, protects = may_protect(regs->orig_ax);
	__u32 slot;

	if (!protects && !may_take(regs->orig_ax, &compat))
		return 0;
	host = the_control();
	if (!host || end_call(host) || !host->followed)
		return 0;
	/* The call may have begun before the address space was followed, or with another file behind its descriptor. */
	slot = protects ? protected_slot(regs, regs->orig_ax) : taken_slot(host, regs, regs->orig_ax, compat);
	if (slot != NO_SLOT)
		count_ended(slot, protects);
	return 0;
}

/* A thread that is killed during a call may not reach its exit. */
SEC("tp_btf/sched_process_exit")
int on_thread_exit(__u64 *ctx)
{
	struct fdmap_space_control *host = the_control();

	if (host)
		end_call(host);
	return 0;
}

/* The child does not run yet. It has the address space of the parent (a thread, CLONE_VM), or a copy. */
SEC("tp_btf/sched_process_fork")
int on_fork(__u64 *ctx)
{
	struct task_struct___of_space *parent = (void *)ctx[0], *child = (void *)ctx[1];
	struct fdmap_space_control *host = the_control();
	struct fdmap_space *space;
	__u64 from = 0, to = 0;
	__u32 slot;

	if (!host || !host->followed || bpf_core_read(&from, sizeof(from), &parent->mm) ||
	    bpf_core_read(&to, sizeof(to), &child->mm) || !to || to == from)
		return 0;
	slot = slot_of(from);
	space = slot == NO_SLOT ? NULL : bpf_map_lookup_elem(&space_slots, &slot);
	if (space)
		count(&space->copies);
	return 0;
}

/* linux/sched.h: IO workers, user workers and kernel threads. Some have copies of their creator's registers. */
#define PF_IO_WORKER 0x10
#define PF_USER_WORKER 0x4000
#define PF_KTHREAD 0x200000
#define TASK_STOPPED 4
#define TASK_TRACED 8

/* The followed address space that the call of a task may change, if it is a call that is counted; NO_SLOT for all other calls, and
 * ANY_SLOT if that is unknown. */
static __always_inline __u32 called_slot(struct task_struct___of_space *task, struct pt_regs *regs)
{
	__u32 number = regs->orig_ax;
	__u64 mm = (__u64)task->mm, file, found;
	bool compat = task->thread_info.status & TS_COMPAT;

	if (may_protect(number) && makes_writable(regs, number, compat))
		return slot_of(mm);
	if (compat ? number == NR_MREMAP_COMPAT : (number & ~X32_BIT) == NR_MREMAP)
		return (compat ? regs->si : regs->r10) & MREMAP_DONTUNMAP ? slot_of(mm) : NO_SLOT;
	if (compat ? number != NR_IOCTL_COMPAT : number != NR_IOCTL && number != (X32_BIT | NR_IOCTL_X32))
		return NO_SLOT;
	if (!takes_bits(compat ? regs->cx : regs->si))
		return NO_SLOT;
	file = address_of_file(task, compat ? regs->bx : regs->di);
	/* The descriptor was closed during the call: it may have been that of any address space. */
	if (!file)
		return ANY_SLOT;
	found = space_of_file(file);
	return found ? slot_of(found) : NO_SLOT;
}

/*
 * Counts the tasks that are in a call which may take written bits of a followed address space or make its memory writable. Run on
 * demand, to find calls that began before the address space was followed. The registers of a task that is not in a system call
 * are those of its last entry to the kernel: a task may be counted after its call, until it enters the kernel again.
 */
SEC("iter/task")
int find_calls(struct bpf_iter__task *ctx)
{
	struct task_struct___of_space *task = ctx->task;
	struct fdmap_space_control *host = the_control();
	struct fdmap_space *space;
	struct pt_regs *regs;
	__u32 slot;

	if (!task || !host || !task->mm || is_service(host, task->tgid) ||
	    task->flags & (PF_IO_WORKER | PF_USER_WORKER | PF_KTHREAD) || task->__state & (TASK_STOPPED | TASK_TRACED))
		return 0;
	regs = (void *)bpf_task_pt_regs((void *)task);
	if (!regs)
		return 0;
	slot = called_slot(task, regs);
	if (slot == ANY_SLOT)
		count(&host->calling);
	space = slot == NO_SLOT ? NULL : bpf_map_lookup_elem(&space_slots, &slot);
	if (space)
		count(&space->calling);
	return 0;
}

/*
 * Arguments: a pagemap and a userfaultfd of the service. Run on demand, once. Learns how the kernel identifies the service and
 * these kinds of files. Returns enum fdmap_status.
 */
SEC("raw_tp")
int learn(struct bpf_raw_tracepoint_args *ctx)
{
	struct file___with_operations *pagemap = (void *)address_of_open_file(ctx->args[0]);
	struct file___with_operations *uffd = (void *)address_of_open_file(ctx->args[1]);
	struct fdmap_space_control *host = the_control();

	if (!pagemap || !uffd)
		return FDMAP_STATUS_BAD_FD;
	if (!host)
		return FDMAP_STATUS_FAULT;
	host->service = bpf_get_current_pid_tgid() >> 32;
	host->pagemap_ops = (__u64)BPF_CORE_READ(pagemap, f_op);
	host->uffd_ops = (__u64)BPF_CORE_READ(uffd, f_op);
	if (!host->pagemap_ops || !host->uffd_ops || host->pagemap_ops == host->uffd_ops)
		return FDMAP_STATUS_LAYOUT;
	return FDMAP_STATUS_OK;
}

/* Argument: a name for the process that runs the program, a holder. Returns enum fdmap_status. */
SEC("raw_tp")
int add_holder(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 process = bpf_get_current_pid_tgid() >> 32;
	__u64 name = ctx->args[0];

	return bpf_map_update_elem(&holders, &process, &name, BPF_ANY) ? FDMAP_STATUS_FULL : FDMAP_STATUS_OK;
}

/* Arguments: a pagemap of the service, slot. Run on demand. Returns enum fdmap_status. */
SEC("raw_tp")
int follow_space(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 key = space_of_descriptor(ctx->args[0]);
	struct fdmap_space_control *host = the_control();
	__u32 slot = ctx->args[1], *known;

	if (!host || !key)
		return FDMAP_STATUS_BAD_FD;
	known = bpf_map_lookup_elem(&followed_spaces, &key);
	if (known) {
		host->found = *known;
		return FDMAP_STATUS_TWICE;
	}
	return bpf_map_update_elem(&followed_spaces, &key, &slot, BPF_NOEXIST) ? FDMAP_STATUS_FULL : FDMAP_STATUS_OK;
}

/* Argument: a pagemap of the service. Run on demand. Returns enum fdmap_status. */
SEC("raw_tp")
int unfollow_space(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 key = space_of_descriptor(ctx->args[0]);

	if (!key)
		return FDMAP_STATUS_BAD_FD;
	return bpf_map_delete_elem(&followed_spaces, &key) ? FDMAP_STATUS_TWICE : FDMAP_STATUS_OK;
}
