/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * The data that space_events.bpf.c shares with tracking/observe/space_events.rs. This header is the only definition: the build
 * generates the Rust types from it (server/build.rs).
 */
#ifndef FDMAP_SPACE_RECORD_H
#define FDMAP_SPACE_RECORD_H

/* State of the whole host. */
struct fdmap_space_control {
	__u64 followed;    /* number of followed address spaces, written by the service. At 0 the programs return at once */
	__u64 service;     /* process id of the service in the initial pid namespace */
	__u64 pagemap_ops; /* file operations of /proc/PID/pagemap */
	__u64 uffd_ops;    /* file operations of userfaultfds */
	__u64 begun;       /* entries added to in_flight */
	__u64 ended;       /* entries removed from in_flight */
	__u64 calling;     /* tasks that find_calls found in a call that may take bits of any address space */
	__u64 found;       /* follow_space returned FDMAP_STATUS_TWICE: the slot of the address space */
};

/* A call of madvise(MADV_GUARD_INSTALL) that begins. Rust: GuardRecord in server/src/bpf/records.rs. */
struct fdmap_guard_record {
	__u64 slot;   /* of the address space */
	__u64 start;  /* address */
	__u64 length; /* bytes; 0: the call is only counted in unranged */
};

/* Guard records of one address space that the service has not read. Further calls are not reported. */
#define FDMAP_MAX_GUARDS 16

/* One followed address space. All members are counters that never decrease. */
struct fdmap_space {
	__u64 begun;  /* calls that may take written bits, counted when they begin */
	__u64 ended;  /* the same calls, counted when they end */
	__u64 copies; /* children that got a copy of the address space, counted before they run */
	__u64 unranged;    /* calls of process_madvise(MADV_GUARD_INSTALL), counted when they begin */
	__u64 guards;      /* guard records */
	__u64 guards_read; /* those that the service has read, written by the service */
	__u64 protect_begun; /* calls that may make a shared mapping writable, counted when they begin */
	__u64 protect_ended; /* the same calls, counted when they end */
	__u64 uncounted; /* calls of both kinds for which in_flight had no room */
	__u64 calling; /* tasks that find_calls found in a call that may take bits or make a mapping writable */
};

#endif
