/* A process whose private memory another process fills, as a VMM that loads a snapshot: it maps memory, registers it with userfaultfd, passes
 * the descriptor and a JSON list of its mappings over a unix socket, and then reads commands from its standard input.
 *
 * uffd_guest SOCKET BYTES [OPTION]...
 *   shared:  map a memfd with MAP_SHARED
 *   drop:    close the own descriptor after it was passed
 *   huge:    hugetlb pages of 2 MiB
 *   fork:    children are followed (UFFD_FEATURE_EVENT_FORK)
 *   remap:   moved memory is followed (UFFD_FEATURE_EVENT_REMAP)
 *   unmap:   unmapped memory is followed (UFFD_FEATURE_EVENT_UNMAP)
 *   half:    the second half is not registered
 *   outside: the message has more memory than the image
 *   larger:  the message has pages of 2 MiB
 *   smaller: the message has base pages
 *   other:   another process connects to the socket
 *   invalid: the message is no list
 *   busy:    another userfaultfd than that of the mappings is passed
 *   wp:      pages can be write-protected
 *   thread:  a process that shares the address space reads the commands, and the one that connected exits
 *   execute: with thread, the process that connected executes another program instead of exiting
 *   marked:  all pages, which are absent, are write-protected before the descriptor is passed
 *   written: the first page is written before the mapping is registered
 *   blocking: the descriptor is made blocking after it was passed
 *   exit=N:  read the first page, and exit with N instead of reading commands
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Not in the headers of older distributions. */
#ifndef UFFD_FEATURE_WP_UNPOPULATED
#define UFFD_FEATURE_WP_UNPOPULATED (1 << 13)
#endif
#ifndef UFFD_FEATURE_WP_HUGETLBFS_SHMEM
#define UFFD_FEATURE_WP_HUGETLBFS_SHMEM (1 << 12)
#endif
#define PAGE 4096UL
#define HUGE (2UL << 20)

static unsigned char *halves[2];
static size_t half, unit = PAGE, message_unit, excess, registered = 2;
static int invalid, busy, wp, marked, written, own_uffd;
static unsigned char *moved;
static uint64_t features = UFFD_FEATURE_EVENT_REMOVE;
static sigjmp_buf jump;

static void fail(const char *what)
{
	fprintf(stderr, "uffd_guest: %s: %s\n", what, strerror(errno));
	exit(100);
}

static unsigned char *page(size_t number)
{
	size_t offset = number * PAGE;
	return offset < half ? halves[0] + offset : halves[1] + (offset - half);
}

static uint64_t now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void on_sigbus(int signal)
{
	(void)signal;
	siglongjmp(jump, 1);
}

static int new_uffd(void)
{
	int uffd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	struct uffdio_api api = { .api = UFFD_API, .features = features };
	if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api))
		fail("userfaultfd");
	return uffd;
}

/* Two mappings: the first and the second half of the file of the image. */
static int map(int shared)
{
	int uffd = own_uffd = new_uffd();
	for (int i = 0; i < 2; i++) {
		int flags = MAP_PRIVATE | MAP_ANONYMOUS, fd = -1;
		if (unit == HUGE)
			flags |= MAP_HUGETLB | 21 << MAP_HUGE_SHIFT;
		if (shared) {
			fd = memfd_create("shared", 0);
			flags = MAP_SHARED;
			if (fd < 0 || ftruncate(fd, half))
				fail("memfd");
		}
		/* Aligned to huge pages, and with a gap after it. */
		unsigned char *space = mmap(NULL, half + 2 * HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (space == MAP_FAILED)
			fail("mmap");
		space = (unsigned char *)(((uintptr_t)space + HUGE - 1) & ~(HUGE - 1));
		halves[i] = mmap(space, half, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, 0);
		if (halves[i] == MAP_FAILED)
			fail("mmap");
		if (written && i == 0)
			halves[0][0] = 0x11;
		if (i >= (int)registered)
			continue;
		struct uffdio_register range = {
			.range = { .start = (uintptr_t)halves[i], .len = half },
			.mode = UFFDIO_REGISTER_MODE_MISSING | (wp ? UFFDIO_REGISTER_MODE_WP : 0),
		};
		if (marked)
			range.mode |= UFFDIO_REGISTER_MODE_WP;
		if (ioctl(uffd, UFFDIO_REGISTER, &range))
			fail("UFFDIO_REGISTER");
		struct uffdio_writeprotect protect = { .range = range.range, .mode = UFFDIO_WRITEPROTECT_MODE_WP };
		if (marked && ioctl(uffd, UFFDIO_WRITEPROTECT, &protect))
			fail("UFFDIO_WRITEPROTECT");
	}
	return busy ? new_uffd() : uffd;
}

static int connection(const char *path)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	strncpy(address.sun_path, path, sizeof address.sun_path - 1);
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	uint64_t begin = now();
	while (connect(fd, (struct sockaddr *)&address, sizeof address)) {
		if (now() - begin > 20000000000)
			fail(path);
		usleep(1000);
	}
	return fd;
}

static void pass(int fd, int uffd)
{
	char json[1024];
	int length = 0;
	for (int i = 0; i < 2; i++)
		length += snprintf(json + length, sizeof json - length,
			"%s{\"base_host_virt_addr\":%llu,\"size\":%zu,\"offset\":%zu,\"page_size\":%zu,\"page_size_kib\":%zu}",
			i ? "," : "[", (unsigned long long)(uintptr_t)halves[i], half + i * excess, i * half, message_unit, message_unit);
	json[length++] = ']';
	if (invalid)
		json[0] = '{';
	struct iovec part = { json, length };
	char control[CMSG_SPACE(sizeof uffd)] = { 0 };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(sizeof uffd);
	memcpy(CMSG_DATA(header), &uffd, sizeof uffd);
	if (sendmsg(fd, &message, 0) != length)
		fail("sendmsg");
	close(fd);
}

/* Removes every `step`th page from `first` on, while other threads do so too, and writes to it. A removed page that is not zero is a failure. */
struct churn {
	size_t first, step, pages;
	size_t wrong;
};

static void *churn(void *argument)
{
	struct churn *work = argument;
	for (size_t number = work->first; number < work->pages; number += work->step) {
		if (madvise(page(number), PAGE, MADV_DONTNEED))
			fail("madvise");
		for (size_t i = 0; i < PAGE; i++)
			work->wrong += page(number)[i] != 0;
		page(number)[7] = 0x5a;
	}
	return NULL;
}

static void churn_all(size_t threads, size_t step, size_t pages)
{
	pthread_t thread[16];
	struct churn work[16];
	size_t wrong = 0;
	for (size_t i = 0; i < threads; i++) {
		/* The last page first: the stream comes from the other end. */
		work[i] = (struct churn){ .first = i * step, .step = threads * step, .pages = pages, .wrong = 0 };
		if (pthread_create(&thread[i], NULL, churn, &work[i]))
			fail("pthread_create");
	}
	for (size_t i = 0; i < threads; i++) {
		pthread_join(thread[i], NULL);
		wrong += work[i].wrong;
	}
	printf("ok %zu\n", wrong);
}

static void read_at(volatile unsigned char *bytes)
{
	uint64_t begin = now();
	if (sigsetjmp(jump, 1)) {
		printf("ok sigbus\n");
		return;
	}
	unsigned char first = bytes[0];
	uint64_t end = now();
	printf("ok %02x%02x%02x%02x %llu\n", first, bytes[1], bytes[2], bytes[3], (unsigned long long)(end - begin));
}

static void *touch(void *address)
{
	(void)*(volatile unsigned char *)address;
	return NULL;
}

static int pipes[2];

static atomic_int probes;

/* Reads a byte without SIGBUS, again and again. */
static void *probe(void *address)
{
	do {
		char byte;
		if (write(pipes[1], address, 1) == 1)
			(void)!read(pipes[0], &byte, 1);
	} while (probes);
	return NULL;
}

/* Moves pages over others, each while a thread accesses the page that is replaced, and then the other one. */
static void cover(size_t target, size_t source, size_t count)
{
	if (!pipes[1] && pipe(pipes))
		fail("pipe");
	for (size_t i = 0; i < count; i++) {
		pthread_t thread;
		unsigned char *from = page(source) + i * unit, *to = page(target) + i * unit;
		probes = 1;
		if (pthread_create(&thread, NULL, probe, to))
			fail("pthread_create");
		usleep(i % 20 * 10);
		if (mremap(from, unit, unit, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED)
			fail("mremap");
		probes = 0;
		pthread_join(thread, NULL);
	}
	printf("ok\n");
}

/* Changes of two threads that overlap: they end when their events are read. */
static pthread_t changers[2];
static size_t change_count;
static unsigned char *change_from, *change_over;
/* The first bytes of each page in a child, or SIGBUS_MARK. */
#define SIGBUS_MARK 0x73756267u
static volatile uint32_t *child_pages;

static void *move_away(void *unused)
{
	(void)unused;
	if (mremap(change_from, change_count * PAGE, change_count * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, moved) == MAP_FAILED)
		fail("mremap");
	return NULL;
}

/* Over the memory that is moved away. */
static void *move_there(void *unused)
{
	(void)unused;
	if (mremap(change_over, change_count * PAGE, change_count * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, change_from) == MAP_FAILED)
		fail("mremap");
	return NULL;
}

static void *unmap(void *unused)
{
	(void)unused;
	if (munmap(change_from, change_count * PAGE))
		fail("munmap");
	return NULL;
}

/* Reads the pages in a child. */
static void *fork_reader(void *address)
{
	/* fork(3) would hold locks of the C library while it waits. */
	pid_t child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	if (!child) {
		static volatile size_t number;
		for (number = 0; number < change_count; number++) {
			if (sigsetjmp(jump, 1))
				child_pages[number] = SIGBUS_MARK;
			else
				child_pages[number] = *(volatile uint32_t *)((unsigned char *)address + number * PAGE);
		}
		_exit(0);
	}
	waitpid(child, NULL, 0);
	return NULL;
}

static void overlap(const char *kind, size_t first, size_t second, size_t count)
{
	void *(*calls[2])(void *) = { move_away, move_there };
	void *argument = NULL;
	change_from = page(first);
	change_over = page(second);
	change_count = count;
	moved = mmap(NULL, count * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	child_pages = mmap(NULL, count * sizeof *child_pages, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (moved == MAP_FAILED || child_pages == MAP_FAILED)
		fail("mmap");
	if (!strcmp(kind, "fork_move") || !strcmp(kind, "fork_unmap")) {
		calls[0] = fork_reader;
		calls[1] = strcmp(kind, "fork_move") ? unmap : move_away;
		argument = change_from;
	} else if (!strcmp(kind, "move_fork")) {
		calls[1] = fork_reader;
		argument = moved;
	}
	for (int i = 0; i < 2; i++) {
		if (pthread_create(&changers[i], NULL, calls[i], argument))
			fail("pthread_create");
		/* It waits until its event is read. */
		usleep(200000);
	}
	printf("ok\n");
}

static void command(const char *line)
{
	size_t first, second, third;
	char path[512];
	if (sscanf(line, "read %zu", &first) == 1) {
		read_at(page(first));
	} else if (sscanf(line, "write %zu %zu", &first, &second) == 2) {
		page(first)[0] = second;
		printf("ok\n");
	} else if (sscanf(line, "cover %zu %zu %zu", &first, &second, &third) == 3) {
		cover(first, second, third);
	} else if (sscanf(line, "wp %zu", &first) == 1) {
		struct uffdio_writeprotect range = {
			.range = { .start = (uintptr_t)page(first), .len = PAGE }, .mode = UFFDIO_WRITEPROTECT_MODE_WP,
		};
		if (ioctl(own_uffd, UFFDIO_WRITEPROTECT, &range))
			fail("UFFDIO_WRITEPROTECT");
		printf("ok\n");
	} else if (sscanf(line, "exec %zu", &first) == 1) {
		/* While another thread waits for the page. */
		pthread_t thread;
		if (pthread_create(&thread, NULL, touch, page(first)))
			fail("pthread_create");
		usleep(300000);
		printf("ok\n");
		fflush(stdout);
		execlp("cat", "cat", NULL);
		fail("exec");
	} else if (sscanf(line, "remove %zu %zu", &first, &second) == 2) {
		for (size_t number = first; number < first + second; number += half / PAGE) {
			size_t count = first + second - number;
			size_t left = (number * PAGE < half ? half : 2 * half) / PAGE - number;
			if (madvise(page(number), (count < left ? count : left) * PAGE, MADV_DONTNEED))
				fail("madvise");
		}
		printf("ok\n");
	} else if (sscanf(line, "churn %zu %zu %zu", &first, &second, &third) == 3) {
		churn_all(first, second, third);
	} else if (sscanf(line, "replace %zu", &first) == 1) {
		/* By memory that userfaultfd does not support. */
		int fd = open("/proc/self/exe", O_RDONLY);
		if (mmap(page(first), PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 0) == MAP_FAILED)
			fail("mmap");
		close(fd);
		printf("ok\n");
	} else if (sscanf(line, "protect %zu %zu", &first, &second) == 2) {
		if (mprotect(page(first), second * PAGE, PROT_READ))
			fail("mprotect");
		printf("ok\n");
	} else if (sscanf(line, "unmap %zu %zu", &first, &second) == 2) {
		if (munmap(page(first), second * PAGE))
			fail("munmap");
		printf("ok\n");
	} else if (sscanf(line, "move %zu %zu %zu", &first, &second, &third) == 3) {
		/* third: the old mapping stays, and is empty */
		moved = mremap(page(first), second * PAGE, second * PAGE, MREMAP_MAYMOVE | (third ? MREMAP_DONTUNMAP : MREMAP_FIXED),
			mmap(NULL, second * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
		if (moved == MAP_FAILED)
			fail("mremap");
		printf("ok\n");
	} else if (sscanf(line, "again %zu %zu %zu", &first, &second, &third) == 3) {
		/* Moved again and again, without a pause: each time to a new address. */
		size_t bytes = second * PAGE;
		unsigned char *space = mmap(NULL, third * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		moved = page(first);
		for (size_t i = 0; i < third; i++)
			moved = mremap(moved, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, space + i * bytes);
		if (moved == MAP_FAILED)
			fail("mremap");
		printf("ok\n");
	} else if (sscanf(line, "overlap %20s %zu %zu %zu", path, &first, &second, &third) == 4) {
		overlap(path, first, second, third);
	} else if (!strncmp(line, "changed", 7)) {
		for (int i = 0; i < 2; i++)
			pthread_join(changers[i], NULL);
		printf("ok\n");
	} else if (sscanf(line, "child %zu", &first) == 1) {
		const unsigned char *bytes = (const unsigned char *)&child_pages[first];
		if (child_pages[first] == SIGBUS_MARK)
			printf("ok sigbus\n");
		else
			printf("ok %02x%02x%02x%02x\n", bytes[0], bytes[1], bytes[2], bytes[3]);
	} else if (sscanf(line, "moved %zu", &first) == 1) {
		read_at(moved + first * PAGE);
	} else if (sscanf(line, "grandchild %zu", &first) == 1) {
		/* A child that forks at once: of that one, the page. */
		fflush(stdout);
		pid_t child = fork();
		if (!child) {
			pid_t grandchild = fork();
			if (!grandchild) {
				read_at(page(first));
				fflush(stdout);
				_exit(0);
			}
			waitpid(grandchild, NULL, 0);
			_exit(0);
		}
		waitpid(child, NULL, 0);
	} else if (sscanf(line, "fork %zu", &first) == 1) {
		fflush(stdout);
		pid_t child = fork();
		if (!child) {
			read_at(page(first));
			fflush(stdout);
			_exit(0);
		}
		waitpid(child, NULL, 0);
	} else if (sscanf(line, "dump %500s", path) == 1) {
		int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
		for (int i = 0; i < 2; i++)
			if (write(fd, halves[i], half) != (ssize_t)half)
				fail("write");
		close(fd);
		printf("ok\n");
	} else {
		printf("unknown command %s", line);
	}
}

static int commands(void *unused)
{
	char line[600];
	(void)unused;
	setlinebuf(stdout);
	printf("ok %d\n", getpid());
	while (fgets(line, sizeof line, stdin))
		command(line);
	return 0;
}

int main(int argc, char **argv)
{
	int shared = 0, drop = 0, code = -1, other = 0, thread = 0, blocking = 0, execute = 0;
	if (argc < 3)
		return 2;
	half = strtoull(argv[2], NULL, 10) / 2;
	for (int i = 3; i < argc; i++) {
		shared |= !strcmp(argv[i], "shared");
		drop |= !strcmp(argv[i], "drop");
		other |= !strcmp(argv[i], "other");
		thread |= !strcmp(argv[i], "thread");
		blocking |= !strcmp(argv[i], "blocking");
		execute |= !strcmp(argv[i], "execute");
		if (!strcmp(argv[i], "marked")) {
			marked = 1;
			features |= UFFD_FEATURE_WP_UNPOPULATED | UFFD_FEATURE_WP_HUGETLBFS_SHMEM;
		}
		written |= !strcmp(argv[i], "written");
		invalid |= !strcmp(argv[i], "invalid");
		busy |= !strcmp(argv[i], "busy");
		if (!strcmp(argv[i], "wp")) {
			wp = 1;
			features |= UFFD_FEATURE_PAGEFAULT_FLAG_WP;
		}
		if (!strcmp(argv[i], "huge"))
			unit = HUGE;
		if (!strcmp(argv[i], "fork"))
			features |= UFFD_FEATURE_EVENT_FORK;
		if (!strcmp(argv[i], "remap"))
			features |= UFFD_FEATURE_EVENT_REMAP;
		if (!strcmp(argv[i], "unmap"))
			features |= UFFD_FEATURE_EVENT_UNMAP;
		if (!strcmp(argv[i], "half"))
			registered = 1;
		if (!strcmp(argv[i], "outside"))
			excess = HUGE;
		if (!strcmp(argv[i], "larger"))
			message_unit = HUGE;
		if (!strcmp(argv[i], "smaller"))
			message_unit = PAGE;
		sscanf(argv[i], "exit=%d", &code);
	}
	if (!message_unit)
		message_unit = unit;
	const char *path = strcmp(argv[1], "-") ? argv[1] : getenv("FDMAP_UFFD_SOCKET");
	signal(SIGBUS, on_sigbus);
	int fd = connection(path);
	pid_t child = other ? fork() : 0;
	if (child) {
		int status;
		waitpid(child, &status, 0);
		return 0;
	}
	int uffd = map(shared);
	pass(fd, uffd);
	if (blocking)
		fcntl(uffd, F_SETFL, fcntl(uffd, F_GETFL) & ~O_NONBLOCK);
	if (drop)
		close(uffd);
	if (code >= 0)
		return page(0)[0] + code;
	if (thread) {
		/* The handler has found this process when it fills a page. */
		(void)*(volatile unsigned char *)page(1);
		/* The harness kills the process that it started, which exits. */
		alarm(120);
		static char stack[1 << 16] __attribute__((aligned(64)));
		if (clone(commands, stack + sizeof stack, CLONE_VM | CLONE_FILES | SIGCHLD, NULL) < 0)
			fail("clone");
		if (execute)
			execlp("sleep", "sleep", "120", NULL);
		_exit(0);
	}
	return commands(NULL);
}
