/*
 * lock_holder PATH DIRECTORY [UID]: a process, of user UID, that maps two pages of the file PATH shared and writable, and prints
 * "ok PID". It obeys lines of input, and prints "ok" after each but the first:
 *
 * hold: hold the mmap_lock of the address space for writing until `release`, or until this program is killed
 * hold-inode: hold the lock of the inode of the file PATH (i_rwsem) for as long, in pwrite(2) of the first byte of its second page
 * release
 * write PAGE VALUE: write the first byte of a page of the file
 * userfaultfds COUNT: create so many userfaultfds, of which each close waits for the mmap_lock
 * connect stream|seqpacket PATH: connect to PATH once for each of them
 * pass: send each of them by its connection, and close it here
 * connect-and-pass stream|seqpacket PATH: connect, send and close one after the other
 *
 * Contains no fdmap code.
 *
 * Each process of this program is of the user, without other groups, when the first call is left unanswered. Root only opens PATH, as a
 * service passes a file to its user, and mounts the file system, as fusermount(1) does for any user.
 *
 * This program serves a FUSE file system on DIRECTORY, in a mount namespace of its own, and answers no READ before `release`. One child
 * reads a page of its file, which so stays locked. Another child maps the same file by direct I/O: mmap waits for that page,
 * with its mmap_lock. Or it writes from a mapping of that page, which waits with the lock of the written file. The end of this
 * program ends the file system, and so both waits.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/fuse.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#define PAGE 4096UL
#define FILE_NODE 2
/* st_mode of a directory and of a file, which sys/stat.h and linux/fuse.h leave to the server. */
#define DIRECTORY_MODE (S_IFDIR | 0755)
#define FILE_MODE (S_IFREG | 0777)

static void check(int failed, const char *what) {
    if (failed) {
        /* An answer: the exit of a process that holds a lock waits. */
        printf("%s: %s\n", what, strerror(errno));
        fflush(stdout);
        exit(1);
    }
}

static void become(uid_t user) {
    if (user) check(setgroups(0, NULL) || setresgid(user, user, user) || setresuid(user, user, user), "setresuid");
}

static void reply(int fuse, uint64_t unique, int error, const void *body, size_t bytes) {
    struct fuse_out_header header = {.len = sizeof header + bytes, .error = -error, .unique = unique};
    struct iovec parts[2] = {{&header, sizeof header}, {(void *)body, bytes}};
    /* Fails for a request that was interrupted. */
    if (writev(fuse, parts, bytes ? 2 : 1) < 0) return;
}

static struct fuse_attr attributes(uint64_t node) {
    int is_file = node == FILE_NODE;
    return (struct fuse_attr){
        .ino = node, .size = is_file ? 1 << 20 : 0, .mode = is_file ? FILE_MODE : DIRECTORY_MODE, .nlink = 1, .blksize = PAGE};
}

/* READ requests that wait for `release`. */
#define MAX_WAITING 16
static uint64_t waiting[MAX_WAITING];
static int waiting_count;
static int released;

static void answer_reads(int fuse) {
    static const char page[PAGE];
    while (waiting_count) reply(fuse, waiting[--waiting_count], 0, page, sizeof page);
}

/* Answers all requests, but READ only after `release`. The first open of the file caches its pages, later ones do not. */
static void serve(int fuse, int release) {
    static char request[1 << 17];
    int opens = 0;
    for (;;) {
        struct pollfd polled[2] = {{.fd = fuse, .events = POLLIN}, {.fd = released ? -1 : release, .events = POLLIN}};
        check(poll(polled, 2, -1) < 0, "poll");
        if (polled[1].revents) {
            released = 1;
            answer_reads(fuse);
        }
        if (!polled[0].revents) continue;
        /* A request may have been interrupted since. */
        if (read(fuse, request, sizeof request) <= 0) {
            if (errno == EINTR || errno == ENOENT || errno == EAGAIN) continue;
            return;
        }
        struct fuse_in_header *in = (void *)request;
        struct fuse_init_out init = {.major = 7, .minor = 31, .max_readahead = PAGE, .max_write = PAGE, .time_gran = 1};
        struct fuse_entry_out entry = {.nodeid = FILE_NODE, .attr = attributes(FILE_NODE)};
        struct fuse_attr_out attr = {.attr = attributes(in->nodeid)};
        struct fuse_open_out opened = {0};
        switch (in->opcode) {
        case FUSE_INIT: reply(fuse, in->unique, 0, &init, sizeof init); break;
        case FUSE_LOOKUP: reply(fuse, in->unique, 0, &entry, sizeof entry); break;
        case FUSE_GETATTR: reply(fuse, in->unique, 0, &attr, sizeof attr); break;
        case FUSE_OPEN:
            opened.open_flags = opens++ ? FOPEN_DIRECT_IO : 0;
            reply(fuse, in->unique, 0, &opened, sizeof opened);
            break;
        case FUSE_READ:
            check(waiting_count == MAX_WAITING, "more READ requests than expected");
            waiting[waiting_count++] = in->unique;
            if (released) answer_reads(fuse);
            break;
        case FUSE_FORGET:
        case FUSE_INTERRUPT: break;
        default: reply(fuse, in->unique, ENOSYS, NULL, 0);
        }
    }
}

static void keep_page_locked(int cached) {
    char byte;
    if (pread(cached, &byte, 1, 0)) _exit(0);
    _exit(0);
}

struct hold {
    void *replaced;
    int direct;
    int target;
    const void *locked;
};

static void *hold_lock(void *argument) {
    struct hold *hold = argument;
    /* A mapping that is being replaced is locked by itself too, for readers that take no mmap_lock. */
    void *mapped = mmap(hold->replaced, PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, hold->direct, 0);
    return mapped == MAP_FAILED ? argument : NULL;
}

static void *hold_inode(void *argument) {
    struct hold *hold = argument;
    return pwrite(hold->target, hold->locked, 1, PAGE) == 1 ? NULL : argument;
}

#define MAX_USERFAULTFDS 256
static int userfaultfds[MAX_USERFAULTFDS], connections[MAX_USERFAULTFDS];
static unsigned userfaultfd_count;

static void create_userfaultfds(unsigned count) {
    check(count > MAX_USERFAULTFDS, "too many userfaultfds");
    for (userfaultfd_count = 0; userfaultfd_count < count; userfaultfd_count++) {
        int one = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
        struct uffdio_api api = {.api = UFFD_API};
        check(one < 0 || ioctl(one, UFFDIO_API, &api), "userfaultfd");
        userfaultfds[userfaultfd_count] = one;
    }
}

static void connect_to(unsigned at, const char *type, const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    int one = socket(AF_UNIX, strcmp(type, "stream") ? SOCK_SEQPACKET : SOCK_STREAM, 0);
    check(one < 0 || connect(one, (void *)&address, sizeof address), "connect");
    connections[at] = one;
}

static void pass(unsigned at) {
    /* Begins an HTTP/2 connection. */
    struct iovec bytes = {"PRI * HTTP/2.0\r\n", 16};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {.header = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS}};
    memcpy(CMSG_DATA(&control.header), &userfaultfds[at], sizeof(int));
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    check(sendmsg(connections[at], &message, MSG_NOSIGNAL) != (ssize_t)bytes.iov_len, "sendmsg");
    close(userfaultfds[at]);
}

static void obey(int target, const char *file, uid_t user, int server) {
    become(user);
    /* setresuid() resets both. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_DUMPABLE, 1);
    int cached = open(file, O_RDONLY), direct = open(file, O_RDONLY);
    check(cached < 0 || direct < 0, file);
    struct hold hold = {.direct = direct, .target = target};
    hold.locked = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, cached, 0);
    check(hold.locked == MAP_FAILED, "mmap");
    hold.replaced = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(hold.replaced == MAP_FAILED, "mmap");
    pid_t reader = fork();
    check(reader < 0, "fork");
    if (!reader) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        keep_page_locked(cached);
    }
    volatile char *pages = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, target, 0);
    check(pages == MAP_FAILED, "mmap");
    usleep(200000); /* the page is locked */
    printf("ok %d\n", getpid());
    fflush(stdout);
    char line[256], type[16], path[128];
    unsigned page, value, count;
    pthread_t holder;
    while (fgets(line, sizeof line, stdin)) {
        if (!strcmp(line, "hold\n")) {
            check(pthread_create(&holder, NULL, hold_lock, &hold), "pthread_create");
            continue;
        }
        if (!strcmp(line, "hold-inode\n")) {
            check(pthread_create(&holder, NULL, hold_inode, &hold), "pthread_create");
            continue;
        }
        void *failed = NULL;
        if (!strcmp(line, "release\n")) {
            check(write(server, "r", 1) != 1 || pthread_join(holder, &failed) || failed, "release");
        } else if (sscanf(line, "write %u %u", &page, &value) == 2 && page < 2) {
            pages[page * PAGE] = value;
        } else if (sscanf(line, "userfaultfds %u", &count) == 1) {
            create_userfaultfds(count);
        } else if (sscanf(line, "connect-and-pass %15s %127s", type, path) == 2) {
            for (unsigned at = 0; at < userfaultfd_count; at++) {
                connect_to(at, type, path);
                pass(at);
            }
        } else if (sscanf(line, "connect %15s %127s", type, path) == 2) {
            for (unsigned at = 0; at < userfaultfd_count; at++) connect_to(at, type, path);
        } else if (!strcmp(line, "pass\n")) {
            for (unsigned at = 0; at < userfaultfd_count; at++) pass(at);
        } else {
            exit(2);
        }
        printf("ok\n");
        fflush(stdout);
    }
    _exit(0);
}

int main(int argc, char **argv) {
    char options[128], file[512];
    if (argc < 3) return 2;
    int target = open(argv[1], O_RDWR);
    check(target < 0, argv[1]);
    check(unshare(CLONE_NEWNS), "unshare");
    check(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "mount of private /");
    int fuse = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    check(fuse < 0, "/dev/fuse");
    uid_t user = argc > 3 ? (uid_t)atoi(argv[3]) : 0;
    snprintf(options, sizeof options, "fd=%d,rootmode=40755,user_id=%u,group_id=%u", fuse, user, user);
    check(mount("fuse", argv[2], "fuse", MS_NOSUID | MS_NODEV, options), "mount of fuse");
    snprintf(file, sizeof file, "%s/file", argv[2]);
    int release[2];
    check(pipe(release), "pipe");
    pid_t process = fork();
    check(process < 0, "fork");
    if (!process) {
        close(fuse);
        obey(target, file, user, release[1]);
    }
    become(user);
    serve(fuse, release[0]);
    return 0;
}
