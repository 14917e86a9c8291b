/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * What page_pins.bpf.c is asked and answers, 64 pages at a time; mirrored in probe/pins.rs. Sizes are asserted on both
 * sides and compared with the loaded map.
 */
#ifndef FDMAP_PIN_RECORD_H
#define FDMAP_PIN_RECORD_H

/* Bit i of each word is the i-th of 64 pages. */
struct fdmap_pin_record {
	__u64 wanted; /* pages asked for; nothing else is looked at */
	__u64 dma;    /* of these: pinned for DMA */
	__u64 held;   /* of these: held by a reference that nothing explains, or they moved meanwhile */
};

_Static_assert(sizeof(struct fdmap_pin_record) == 24, "probe/pins.rs");

#endif
