// The project's launch.cuh, with a dependent-launch wait that the scheduler checks.
#pragma once

#define pdl_wait pdl_wait_of_the_device
#include_next <minidecode/launch.cuh>
#undef pdl_wait

namespace minidecode {

inline void pdl_wait() { minidecode_shim::dependency_wait(); }

}  // namespace minidecode
