/* Runs a program as on a kernel without SO_PASSRIGHTS (before Linux 6.16): setsockopt(2) of it fails with ENOPROTOOPT, for the
 * program and the processes that it starts.
 *
 *   without_passrights PROGRAM [ARGUMENT...]
 */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SO_PASSRIGHTS_ 83

static struct sock_filter filter[] = {
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_setsockopt, 0, 3),
    /* The low half of the third argument, on a little-endian host. */
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SO_PASSRIGHTS_, 0, 1),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOPROTOOPT),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
};

int main(int argc, char **argv)
{
    struct sock_fprog program = { sizeof(filter) / sizeof(filter[0]), filter };
    if (argc < 2) {
        fputs("usage: without_passrights PROGRAM [ARGUMENT...]\n", stderr);
        return 2;
    }
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) {
        perror("without_passrights: prctl(PR_SET_SECCOMP)");
        return 1;
    }
    execv(argv[1], argv + 1);
    perror("without_passrights: execv");
    return 1;
}
