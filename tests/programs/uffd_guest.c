/* A process whose private memory another process fills, as a VMM that loads a snapshot: it maps memory, registers it with userfaultfd, passes
 * the descriptor and a JSON list of its mappings over a unix socket, and then reads commands from its standard input.
 *
 * uffd_guest SOCKET BYTES [shared] [drop] [huge] [fork] [exit=N]
 *   shared:  map a memfd with MAP_SHARED
 *   drop:    close the own descriptor after it was passed
 *   huge:    hugetlb pages of 2 MiB
 *   fork:    children are followed (UFFD_FEATURE_EVENT_FORK)
 *   exit=N:  read the first page, and exit with N instead of reading commands
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
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

#define PAGE 4096UL
#define HUGE (2UL << 20)

static unsigned char *halves[2];
static size_t half, unit = PAGE;
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

/* Two mappings: the first and the second half of the file of the image. */
static int map(int shared)
{
	int uffd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	struct uffdio_api api = { .api = UFFD_API, .features = features };
	if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api))
		fail("userfaultfd");
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
		halves[i] = mmap(NULL, half, PROT_READ | PROT_WRITE, flags, fd, 0);
		if (halves[i] == MAP_FAILED)
			fail("mmap");
		struct uffdio_register range = {
			.range = { .start = (uintptr_t)halves[i], .len = half }, .mode = UFFDIO_REGISTER_MODE_MISSING,
		};
		if (ioctl(uffd, UFFDIO_REGISTER, &range))
			fail("UFFDIO_REGISTER");
	}
	return uffd;
}

static void pass(const char *path, int uffd)
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
	char json[1024];
	int length = 0;
	for (int i = 0; i < 2; i++)
		length += snprintf(json + length, sizeof json - length,
			"%s{\"base_host_virt_addr\":%llu,\"size\":%zu,\"offset\":%zu,\"page_size\":%zu,\"page_size_kib\":%zu}",
			i ? "," : "[", (unsigned long long)(uintptr_t)halves[i], half, i * half, unit, unit);
	json[length++] = ']';
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

static void access_page(size_t number)
{
	uint64_t begin = now();
	if (sigsetjmp(jump, 1)) {
		printf("ok sigbus\n");
		return;
	}
	volatile unsigned char *bytes = page(number);
	unsigned char first = bytes[0];
	uint64_t end = now();
	printf("ok %02x%02x%02x%02x %llu\n", first, bytes[1], bytes[2], bytes[3], (unsigned long long)(end - begin));
}

static void command(const char *line)
{
	size_t first, second, third;
	char path[512];
	if (sscanf(line, "read %zu", &first) == 1) {
		access_page(first);
	} else if (sscanf(line, "write %zu %zu", &first, &second) == 2) {
		page(first)[0] = second;
		printf("ok\n");
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
	} else if (sscanf(line, "fork %zu", &first) == 1) {
		fflush(stdout);
		pid_t child = fork();
		if (!child) {
			access_page(first);
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

int main(int argc, char **argv)
{
	int shared = 0, drop = 0, code = -1;
	if (argc < 3)
		return 2;
	for (int i = 3; i < argc; i++) {
		shared |= !strcmp(argv[i], "shared");
		drop |= !strcmp(argv[i], "drop");
		if (!strcmp(argv[i], "huge"))
			unit = HUGE;
		if (!strcmp(argv[i], "fork"))
			features |= UFFD_FEATURE_EVENT_FORK;
		sscanf(argv[i], "exit=%d", &code);
	}
	const char *path = strcmp(argv[1], "-") ? argv[1] : getenv("FDMAP_UFFD_SOCKET");
	half = strtoull(argv[2], NULL, 10) / 2;
	signal(SIGBUS, on_sigbus);
	int uffd = map(shared);
	pass(path, uffd);
	if (drop)
		close(uffd);
	if (code >= 0)
		return page(0)[0] + code;
	setlinebuf(stdout);
	printf("ok %d\n", getpid());
	char line[600];
	while (fgets(line, sizeof line, stdin))
		command(line);
	return 0;
}
