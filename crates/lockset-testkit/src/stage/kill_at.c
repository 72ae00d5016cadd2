/* Runs a program of one thread and kills it before its Nth system call: `kill_at N PROGRAM ARGS`.
 * Exits with 99 if it killed the program, otherwise with the program's own code. */
#include <signal.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (argc < 3) return 98;
    long limit = atol(argv[1]), entered = 0;
    int status, inside = 0, signal = 0;
    pid_t child = fork();
    if (child < 0) return 98;
    if (child == 0) {
        ptrace(PTRACE_TRACEME, 0, NULL, NULL);
        execv(argv[2], argv + 2);
        _exit(98);
    }
    if (waitpid(child, &status, 0) < 0 || !WIFSTOPPED(status)) return 98;
    long options = PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL;
    if (ptrace(PTRACE_SETOPTIONS, child, NULL, options)) return 98;
    for (;;) {
        if (ptrace(PTRACE_SYSCALL, child, NULL, (void *)(long)signal)) return 98;
        if (waitpid(child, &status, 0) < 0) return 98;
        if (WIFEXITED(status)) return WEXITSTATUS(status);
        if (!WIFSTOPPED(status)) return 98;
        signal = WSTOPSIG(status);
        if (signal == (SIGTRAP | 0x80)) {
            signal = 0;
            inside = !inside;
            if (inside && ++entered == limit) {
                kill(child, SIGKILL);
                waitpid(child, &status, 0);
                return WIFSIGNALED(status) ? 99 : 98;
            }
        }
    }
}
