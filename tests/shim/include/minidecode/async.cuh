// The project's async.cuh, with bulk copies that land as late (or as early) as the engine allows.
#pragma once

#define mbarrier_init mbarrier_init_of_the_device
#define mbarrier_expect_bytes mbarrier_expect_bytes_of_the_device
#define mbarrier_wait mbarrier_wait_of_the_device
#define bulk_copy bulk_copy_of_the_device
#include_next <minidecode/async.cuh>
#undef mbarrier_init
#undef mbarrier_expect_bytes
#undef mbarrier_wait
#undef bulk_copy

namespace minidecode {

using minidecode_shim::bulk_copy;
using minidecode_shim::mbarrier_init;
using minidecode_shim::mbarrier_wait;

inline void mbarrier_expect_bytes(uint64_t* barrier, uint32_t bytes) {
  minidecode_shim::mbarrier_arrive(barrier, bytes);
}

}  // namespace minidecode
