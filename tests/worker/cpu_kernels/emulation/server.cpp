// Runs in an emulator of another processor and makes the calls of a Python process (library.py) to a kernel library
// that is compiled for that processor.
//
//   server LIBRARY    takes requests from standard input, sends messages to standard output
//
// Arguments are numbers and addresses in the memory of Python, which this process reads as its own: it maps none of it
// at first, and the handler of the page fault (SIGSEGV) asks Python for the contents of the page and maps it at the same
// address. A first write to a page keeps its original contents. When the call returns, changed words are sent to Python,
// and all pages are unmapped, since Python may change them until the next call.
#include <dlfcn.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

namespace {

constexpr uintptr_t PAGE = 4096, WORDS = PAGE / sizeof(uint64_t);
constexpr int64_t PAGES_AT_ONCE = 16;  // are fetched, unless one of them is mapped or Python has not mapped it
constexpr int INTEGERS = 24, FLOATS = 8;

struct Request {
    char function[48];
    int64_t integers[INTEGERS];  // the integer and address arguments, in their order
    double floats[FLOATS];  // the others: the bits of a float are the lower half of its double
};

enum Kind : int64_t { READY, READ, WRITE, RETURN };

// READ is answered by the number of bytes that follow, 0 where Python has mapped nothing. WRITE is followed by its bytes.
struct Message {
    int64_t kind;
    int64_t value;  // an address, or what the function returns
    int64_t bytes;
};

struct PageCopy {
    std::unique_ptr<uint8_t[]> original;  // null: not written to
};

std::map<uintptr_t, PageCopy> pages;  // that are mapped, by their addresses
std::atomic_flag busy = ATOMIC_FLAG_INIT;  // a thread handles a page fault

[[noreturn]] void fail(const char* text) {
    perror(text);
    _exit(1);
}

void receive(void* to, size_t bytes) {
    for (auto* at = (uint8_t*)to; bytes;) {
        const ssize_t count = read(0, at, bytes);
        if (count == 0) _exit(0);  // Python has ended or has no use for the library
        if (count < 0) fail("read");
        at += count, bytes -= count;
    }
}

void send(const void* from, size_t bytes) {
    for (auto* at = (const uint8_t*)from; bytes;) {
        const ssize_t count = write(1, at, bytes);
        if (count < 0) _exit(0);
        at += count, bytes -= count;
    }
}

void send(const Message& message) { send(&message, sizeof message); }

void make_writable(uintptr_t at, PageCopy& page) {
    page.original.reset(new uint8_t[PAGE]);
    memcpy(page.original.get(), (void*)at, PAGE);
    if (mprotect((void*)at, PAGE, PROT_READ | PROT_WRITE)) fail("mprotect");
}

// Maps the page at `at` and some that follow it. They appear at their addresses with their contents, at once, since
// other threads may read them.
void fetch(uintptr_t at) {
    const auto next = pages.lower_bound(at);
    uintptr_t bytes = PAGES_AT_ONCE * PAGE;
    if (next != pages.end()) bytes = std::min(bytes, next->first - at);
    send({READ, (int64_t)at, (int64_t)bytes});
    int64_t found;
    receive(&found, sizeof found);
    if (found < (int64_t)PAGE) _exit(1);  // Python raises an error
    void* const elsewhere = mmap(nullptr, found, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (elsewhere == MAP_FAILED) fail("mmap");
    receive(elsewhere, found);
    if (mprotect(elsewhere, found, PROT_READ)) fail("mprotect");
    if (mremap(elsewhere, found, found, MREMAP_MAYMOVE | MREMAP_FIXED, (void*)at) == MAP_FAILED) fail("mremap");
    for (uintptr_t page = at; page < at + found; page += PAGE) pages[page];
}

// A second fault at a page is a write, or that of a thread that was late.
void handle_fault(int, siginfo_t* fault, void*) {
    while (busy.test_and_set(std::memory_order_acquire)) sched_yield();
    const uintptr_t at = (uintptr_t)fault->si_addr / PAGE * PAGE;
    const auto found = pages.find(at);
    if (found == pages.end()) fetch(at);
    else if (!found->second.original) make_writable(at, found->second);
    busy.clear(std::memory_order_release);
}

// Sends the changed words of all pages to Python and unmaps the pages.
void return_pages() {
    for (const auto& [at, page] : pages) {
        if (const uint8_t* old = page.original.get()) {
            // No unchanged word between them: Python may have changed it since, such as its heap next to a small tensor.
            const auto *now = (const uint64_t*)at, *before = (const uint64_t*)old;
            for (uintptr_t n = 0; n < WORDS; n++) {
                const uintptr_t first = n;
                while (n < WORDS && now[n] != before[n]) n++;
                if (n == first) continue;
                send({WRITE, (int64_t)(now + first), (int64_t)((n - first) * sizeof *now)});
                send(now + first, (n - first) * sizeof *now);
            }
        }
        munmap((void*)at, PAGE);
    }
    pages.clear();
}

// Integers and floats have registers of their own, and what a function does not take is ignored, so all are called
// alike. More integers than fit into registers are on the stack, where each takes 8 bytes.
int64_t call(void* function, const int64_t (&i)[INTEGERS], const double (&f)[FLOATS]) {
    using Integer = int64_t;
    using Any = int64_t (*)(Integer, Integer, Integer, Integer, Integer, Integer, Integer, Integer, Integer, Integer,
        Integer, Integer, Integer, Integer, Integer, Integer, Integer, Integer, Integer, Integer, Integer, Integer,
        Integer, Integer, double, double, double, double, double, double, double, double);
    return ((Any)function)(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12], i[13], i[14],
        i[15], i[16], i[17], i[18], i[19], i[20], i[21], i[22], i[23], f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]);
}

}  // namespace

int main(int, char** arguments) {
    void* const library = dlopen(arguments[1], RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    struct sigaction action = {};
    action.sa_sigaction = handle_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    send({READY, 0, 0});
    for (Request request;;) {
        receive(&request, sizeof request);
        // "?name" asks whether the library has this function.
        const bool asks = request.function[0] == '?';
        void* const function = dlsym(library, request.function + asks);
        const int64_t value = asks ? function != nullptr : call(function, request.integers, request.floats);
        return_pages();
        send({RETURN, value, 0});
    }
}
