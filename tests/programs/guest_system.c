/*
 * The init of a guest that runs one program: mounts file systems, loads modules, runs the program and powers off. The file
 * /command has its environment, arguments and path, one per line. The second serial line is its output, which ends with the
 * line "status N". See tests/src/guest/system.rs.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

enum { MAX_ARGUMENTS = 16, MAX_LINE = 4096 };

static void check(int failed, const char *what) {
    if (failed) printf("%s: %s\n", what, strerror(errno));
}

static void mount_on(const char *folder, const char *type) {
    mkdir(folder, 0755);
    check(mount(type, folder, type, 0, ""), folder);
}

static void open_line(void) {
    struct termios raw;
    int line = open("/dev/ttyS1", O_RDWR | O_NOCTTY);
    tcgetattr(line, &raw);
    cfmakeraw(&raw);
    tcsetattr(line, TCSANOW, &raw);
    for (int fd = 0; fd < 3; fd++) dup2(line, fd);
    if (line > 2) close(line);
    setvbuf(stdout, NULL, _IONBF, 0);
}

/* Modules are numbered in the order in which they need one another. */
static void load_modules(void) {
    char module[32];
    for (int i = 0; snprintf(module, sizeof module, "/modules/%d.ko", i), !access(module, R_OK); i++) {
        int fd = open(module, O_RDONLY | O_CLOEXEC);
        check(fd < 0 || syscall(SYS_finit_module, fd, "", 0), module);
        close(fd);
    }
}

/* The kernel gives it its address. */
static void enable_loopback(void) {
    struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    check(fd < 0 || ioctl(fd, SIOCSIFFLAGS, &lo), "lo");
    close(fd);
}

static void run_command(void) {
    static char lines[MAX_ARGUMENTS][MAX_LINE];
    char *arguments[MAX_ARGUMENTS + 1] = {0};
    int count = 0;
    FILE *command = fopen("/command", "re");
    struct rlimit files = {1 << 16, 1 << 16};
    for (int i = 0; command && i < MAX_ARGUMENTS && fgets(lines[i], MAX_LINE, command); i++) {
        lines[i][strcspn(lines[i], "\n")] = 0;
        /* The environment comes before the program. */
        if (!count && strchr(lines[i], '=')) putenv(lines[i]);
        else arguments[count++] = lines[i];
    }
    setrlimit(RLIMIT_NOFILE, &files);
    if (count) execv(arguments[0], arguments);
    check(1, "execv");
    _exit(127);
}

int main(void) {
    int status = 0;
    pid_t program, ended;
    if (mount("devtmpfs", "/dev", "devtmpfs", 0, "")) return 1;
    open_line();
    mount_on("/proc", "proc");
    mount_on("/sys", "sysfs");
    mount_on("/sys/fs/cgroup", "cgroup2");
    mount_on("/dev/shm", "tmpfs");
    mount_on("/run", "tmpfs");
    mount_on("/tmp", "tmpfs");
    load_modules();
    enable_loopback();
    program = fork();
    if (!program) {
        setsid();
        run_command();
    }
    /* Orphans are children of this process. */
    while ((ended = wait(&status)) != program) check(ended < 0, "wait");
    printf("\nstatus %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    tcdrain(1);
    reboot(RB_POWER_OFF);
    return 1;
}
