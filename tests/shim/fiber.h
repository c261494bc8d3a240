// Stacks to switch between, and memory that AddressSanitizer is told about. The weak functions are
// AddressSanitizer's, there when its library is preloaded.
#pragma once

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

#include "runtime.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack_save, const void* bottom, size_t size)
    __attribute__((weak));
void __sanitizer_finish_switch_fiber(void* fake_stack_save, const void** bottom_old,
                                     size_t* size_old) __attribute__((weak));
void __asan_poison_memory_region(const volatile void* address, size_t size) __attribute__((weak));
void __asan_unpoison_memory_region(const volatile void* address, size_t size) __attribute__((weak));
}

namespace minidecode_shim {

constexpr size_t kStackBytes = 128 * 1024;

struct Context {
  void* stack_pointer = nullptr;
  char* bottom = nullptr;
  size_t size = 0;
  void* fake_stack = nullptr;
#if !defined(__x86_64__)
  ucontext_t machine;
#endif
};

#if defined(__x86_64__)
extern "C" void minidecode_shim_swap(void** save, void* load);
asm(R"(
.text
.globl minidecode_shim_swap
.hidden minidecode_shim_swap
.type minidecode_shim_swap,@function
minidecode_shim_swap:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size minidecode_shim_swap,.-minidecode_shim_swap
)");
#endif

// Gives a context a stack on which `entry` starts at the first switch to it; it must not return.
inline void prepare_stack(Context& context, void (*entry)()) {
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("no memory for a thread's stack");
  mprotect(memory, page, PROT_NONE);
  context.bottom = static_cast<char*>(memory) + page;
  context.size = kStackBytes;
#if defined(__x86_64__)
  void** top = reinterpret_cast<void**>(context.bottom + kStackBytes);
  *--top = nullptr;  // where entry would return to
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
#else
  getcontext(&context.machine);
  context.machine.uc_stack.ss_sp = context.bottom;
  context.machine.uc_stack.ss_size = kStackBytes;
  context.machine.uc_link = nullptr;
  makecontext(&context.machine, entry, 0);
#endif
}

inline void switch_context(Context& from, Context& to) {
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(&from.fake_stack, to.bottom, to.size);
  }
#if defined(__x86_64__)
  minidecode_shim_swap(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.machine, &to.machine);
#endif
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
  }
}

// To be called first on a new stack.
inline void arrive_on_stack() {
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
}

// The stack that the caller runs on, which the system made.
inline void find_main_stack(Context& context) {
  pthread_attr_t attributes;
  void* bottom = nullptr;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &bottom, &context.size);
  pthread_attr_destroy(&attributes);
  context.bottom = static_cast<char*>(bottom);
}

// Plain loops: a call of memset or memcpy would be AddressSanitizer's, which checks.
inline void fill_ones(char* p, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    *const_cast<volatile char*>(p + i) = char(0xff);
  }
}

inline void copy_bytes(char* to, const char* from, size_t bytes) {
  size_t i = 0;
  for (; i + 8 <= bytes; i += 8) {
    *reinterpret_cast<volatile uint64_t*>(to + i) = *reinterpret_cast<const uint64_t*>(from + i);
  }
  for (; i < bytes; ++i) *const_cast<volatile char*>(to + i) = from[i];
}

// Until it is allowed again, touching this memory is an error.
inline void forbid(const void* p, size_t bytes) {
  if (__asan_poison_memory_region && bytes > 0) __asan_poison_memory_region(p, bytes);
}
inline void allow(const void* p, size_t bytes) {
  if (__asan_unpoison_memory_region && bytes > 0) __asan_unpoison_memory_region(p, bytes);
}

}  // namespace minidecode_shim
