# Finds nvcc (CUDACXX, CUDA_HOME, PATH, /usr/local/cuda, the PyPI packages, in this order) and
# compiles kernels with it. The compiler is called directly: no GPU, driver, cuBLAS or toolkit
# layout is needed, and each source names its own architectures.
set(RIDGELINE_WITH_CUDA OFF)
if(RIDGELINE_CUDA STREQUAL "OFF")
  message(STATUS "Ridgeline: CUDA ops are off (RIDGELINE_CUDA=OFF)")
  return()
endif()

execute_process(
  COMMAND ${Python_EXECUTABLE} -c
    "import importlib.util as u; s = u.find_spec('nvidia'); print(';'.join(s.submodule_search_locations) if s else '')"
  OUTPUT_VARIABLE pypi_dirs OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
list(TRANSFORM pypi_dirs APPEND "/cu13/bin")

if(DEFINED ENV{CUDACXX})
  set(RIDGELINE_NVCC "$ENV{CUDACXX}" CACHE FILEPATH "The CUDA compiler")
endif()
find_program(RIDGELINE_NVCC nvcc PATHS ENV CUDA_HOME PATH_SUFFIXES bin NO_DEFAULT_PATH)
find_program(RIDGELINE_NVCC nvcc PATHS ENV PATH NO_DEFAULT_PATH)
find_program(RIDGELINE_NVCC nvcc PATHS /usr/local/cuda/bin ${pypi_dirs} NO_DEFAULT_PATH)

set(nvcc_version "")
if(RIDGELINE_NVCC)
  execute_process(COMMAND ${RIDGELINE_NVCC} --version OUTPUT_VARIABLE nvcc_text ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" nvcc_version "${nvcc_text}")
  set(nvcc_version "${CMAKE_MATCH_1}")
endif()
if(NOT nvcc_version OR nvcc_version VERSION_LESS 13.0)
  if(RIDGELINE_NVCC)
    set(reason "nvcc at ${RIDGELINE_NVCC} is release '${nvcc_version}', 13.0 or later is needed")
  else()
    set(reason "no nvcc in CUDACXX, CUDA_HOME, PATH, /usr/local/cuda or the nvidia-cuda-nvcc package")
  endif()
  if(RIDGELINE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "Ridgeline: RIDGELINE_CUDA=ON, but ${reason}")
  endif()
  message(STATUS "Ridgeline: CUDA ops are not built: ${reason}")
  return()
endif()
set(RIDGELINE_WITH_CUDA ON)
message(STATUS "Ridgeline: CUDA ops for ${RIDGELINE_CUDA_ARCHS} with ${RIDGELINE_NVCC} (${nvcc_version})")

# Headers and the static runtime beside the compiler, in a toolkit's or the packages' layout.
get_filename_component(nvcc_real "${RIDGELINE_NVCC}" REALPATH)
get_filename_component(cuda_root "${nvcc_real}" DIRECTORY)
get_filename_component(cuda_root "${cuda_root}" DIRECTORY)
find_path(RIDGELINE_CUDA_INCLUDE cuda_runtime.h REQUIRED NO_DEFAULT_PATH
  PATHS "${cuda_root}/include" "${cuda_root}/targets/x86_64-linux/include"
        "${cuda_root}/targets/sbsa-linux/include" /usr/local/cuda/include)
find_library(RIDGELINE_CUDART cudart_static REQUIRED NO_DEFAULT_PATH
  PATHS "${cuda_root}/lib64" "${cuda_root}/lib" "${cuda_root}/targets/x86_64-linux/lib"
        "${cuda_root}/targets/sbsa-linux/lib" /usr/local/cuda/lib64)

# "80,90a,90-virtual" as -gencode options; `hopper` keeps those whose code may use sm_90a's own
# instructions.
string(REGEX REPLACE "[,; ]+" ";" archs "${RIDGELINE_CUDA_ARCHS}")
set(RIDGELINE_GENCODE "")
set(RIDGELINE_GENCODE_SM90 "")
foreach(arch IN LISTS archs)
  if(NOT arch MATCHES "^[0-9]+[af]?(-virtual)?$")
    message(FATAL_ERROR "RIDGELINE_CUDA_ARCHS: expected entries such as 80, 90a or 90-virtual, got '${arch}'")
  endif()
  if(arch MATCHES "^(.*)-virtual$")
    list(APPEND RIDGELINE_GENCODE "-gencode=arch=compute_${CMAKE_MATCH_1},code=compute_${CMAKE_MATCH_1}")
  else()
    list(APPEND RIDGELINE_GENCODE "-gencode=arch=compute_${arch},code=sm_${arch}")
    if(arch STREQUAL "90a")
      list(APPEND RIDGELINE_GENCODE_SM90 "-gencode=arch=compute_${arch},code=sm_${arch}")
    endif()
  endif()
endforeach()

# One object from one kernel file; `gencode` is the name of a list.
function(ridgeline_compile_cuda source gencode result)
  get_filename_component(stem "${source}" NAME_WE)
  set(object "${CMAKE_CURRENT_BINARY_DIR}/cuda/${stem}.o")
  set(launcher ${CMAKE_CUDA_COMPILER_LAUNCHER})
  if(NOT launcher AND DEFINED ENV{CMAKE_CUDA_COMPILER_LAUNCHER})
    set(launcher $ENV{CMAKE_CUDA_COMPILER_LAUNCHER})
  endif()
  add_custom_command(
    OUTPUT "${object}"
    COMMAND ${CMAKE_COMMAND} -E make_directory "${CMAKE_CURRENT_BINARY_DIR}/cuda"
    COMMAND ${launcher} ${RIDGELINE_NVCC} -c "${CMAKE_CURRENT_SOURCE_DIR}/${source}" -o "${object}"
      -MD -MF "${object}.d" -std=c++20 -O3 ${${gencode}} -I "${CMAKE_CURRENT_SOURCE_DIR}/csrc"
      -ccbin ${CMAKE_CXX_COMPILER} -Xcompiler=-fPIC,-fvisibility=hidden,-Wall
      --expt-relaxed-constexpr --expt-extended-lambda -Xptxas=--warn-on-spills
      -Xptxas=--warn-on-local-memory-usage
    DEPENDS "${source}" DEPFILE "${object}.d" JOB_POOL cuda VERBATIM
    COMMENT "CUDA ${source}")
  set(${result} "${object}" PARENT_SCOPE)
endfunction()

# The name _cuda.so needs at load time; a stand-in with that name where only a CPU torch is here.
function(ridgeline_torch_cuda_library result)
  if(EXISTS "${RIDGELINE_TORCH_LIB_DIR}/libtorch_cuda.so")
    set(${result} "${RIDGELINE_TORCH_LIB_DIR}/libtorch_cuda.so" PARENT_SCOPE)
    return()
  endif()
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/generated/torch_cuda_stub.cpp" "")
  add_library(ridgeline_torch_cuda_stub SHARED "${CMAKE_CURRENT_BINARY_DIR}/generated/torch_cuda_stub.cpp")
  set_target_properties(ridgeline_torch_cuda_stub PROPERTIES OUTPUT_NAME torch_cuda
    LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/generated")
  set(${result} ridgeline_torch_cuda_stub PARENT_SCOPE)
endfunction()

# ridgeline_add_cuda_module(name CXX files... CUDA files... SM90 files...)
function(ridgeline_add_cuda_module name)
  cmake_parse_arguments(arg "" "" "CXX;CUDA;SM90" ${ARGN})
  set(objects "")
  foreach(source IN LISTS arg_CUDA)
    ridgeline_compile_cuda(${source} RIDGELINE_GENCODE object)
    list(APPEND objects "${object}")
  endforeach()
  if(RIDGELINE_GENCODE_SM90)
    foreach(source IN LISTS arg_SM90)
      ridgeline_compile_cuda(${source} RIDGELINE_GENCODE_SM90 object)
      list(APPEND objects "${object}")
    endforeach()
  endif()
  add_library(${name} MODULE ${arg_CXX} ${objects})
  set_source_files_properties(${objects} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
  set_target_properties(${name} PROPERTIES PREFIX "" SUFFIX ".so")
  target_compile_definitions(${name} PRIVATE USE_CUDA)
  target_include_directories(${name} SYSTEM PRIVATE "${RIDGELINE_CUDA_INCLUDE}")
  ridgeline_torch_cuda_library(torch_cuda)
  target_link_libraries(${name} PRIVATE ridgeline_common ridgeline_torch ridgeline_build_info
    ${RIDGELINE_CUDART} ${CMAKE_DL_LIBS} rt pthread)
  target_link_libraries(${name} PRIVATE -Wl,--push-state,--no-as-needed ${torch_cuda} -Wl,--pop-state)
  target_link_options(${name} PRIVATE -Wl,--exclude-libs,ALL -s)
endfunction()
