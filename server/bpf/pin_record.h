/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * The request to and the answer of page_pins.bpf.c, 64 pages at a time. This header is the only definition: the build
 * generates the Rust type from it (server/build.rs).
 */
#ifndef FDMAP_PIN_RECORD_H
#define FDMAP_PIN_RECORD_H

/* Bit i of each word stands for page i of 64. */
struct fdmap_pin_record {
	__u64 requested;       /* the pages to examine */
	__u64 dma;             /* requested pages that are pinned for DMA */
	__u64 extra_reference; /* requested pages with an unexplained reference, or that changed during the search */
};

#endif
