# build_info.h: one id for _C and _cuda, the hash of all sources, so that equal sources make equal
# builds and parts of different builds are told apart.
file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/csrc/*")
list(SORT sources)
set(hashes "")
foreach(source IN LISTS sources)
  file(SHA256 "${source}" hash)
  string(APPEND hashes ${hash})
endforeach()
string(SHA256 build_id "${hashes}")
string(SUBSTRING ${build_id} 0 16 build_id)
file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/generated/build_info.h" CONTENT
"#pragma once

namespace ridgeline {
inline constexpr const char* kBuildId = \"@build_id@\";
inline constexpr const char* kCudaArchitectures = \"@RIDGELINE_CUDA_ARCHS@\";
}  // namespace ridgeline
" @ONLY)
add_library(ridgeline_build_info INTERFACE)
target_include_directories(ridgeline_build_info INTERFACE "${CMAKE_CURRENT_BINARY_DIR}/generated")
