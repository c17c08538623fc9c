// Hides all beyond AVX2 from a program that is started with this library in LD_PRELOAD: the instruction CPUID faults
// (ARCH_SET_CPUID of arch_prctl(2), on processors with `cpuid_fault`), and the handler of the fault answers without the
// bits of AVX-512, AMX and AVX-VNNI. For x86-64 Linux.
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define BIT(n) (1u << (n))

enum { ARCH_SET_CPUID = 0x1012 };

static struct sigaction previous;

static long allow_cpuid(int allowed) { return syscall(SYS_arch_prctl, ARCH_SET_CPUID, allowed); }

static void answer(int number, siginfo_t* info, void* context) {
    greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
    const unsigned char* at = (const unsigned char*)registers[REG_RIP];
    if (info->si_code != SI_KERNEL || at[0] != 0x0f || at[1] != 0xa2) {  // no CPUID: it faults again, as it would
        sigaction(SIGSEGV, &previous, NULL);
        return;
    }
    const unsigned leaf = registers[REG_RAX], part = registers[REG_RCX];
    unsigned a, b, c, d;
    allow_cpuid(1);
    __cpuid_count(leaf, part, a, b, c, d);
    allow_cpuid(0);
    if (leaf == 7 && part == 0) {
        b &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31));  // AVX-512 F to VL
        c &= ~(BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14));  // VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ
        d &= ~(BIT(2) | BIT(3) | BIT(8) | BIT(22) | BIT(23) | BIT(24) | BIT(25));  // AVX-512 FP16 and others, AMX
    } else if (leaf == 7 && part == 1) {
        a &= ~(BIT(4) | BIT(5) | BIT(21) | BIT(23));  // AVX-VNNI, AVX-512 BF16, AMX-FP16, AVX-IFMA
        d &= ~(BIT(4) | BIT(5) | BIT(8) | BIT(10) | BIT(19));  // AVX-VNNI-INT8, AVX-NE-CONVERT, AVX10 and others
    }
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void start(void) {
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, &action, &previous);
    if (allow_cpuid(0) != 0) {
        fputs("hide_avx512: this system does not let CPUID fault\n", stderr);
        _exit(1);
    }
}
