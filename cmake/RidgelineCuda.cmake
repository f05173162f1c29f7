# Finds nvcc (CUDACXX, CUDA_HOME, PATH, /usr/local/cuda, the PyPI packages; the first that works)
# and compiles kernels with it. The compiler is called directly: no GPU, driver, cuBLAS or toolkit
# layout is needed, and each source names its own architectures.
set(RIDGELINE_NVCC "" CACHE FILEPATH "The CUDA compiler; empty: search")
set(RIDGELINE_WITH_CUDA OFF)
if(RIDGELINE_CUDA STREQUAL "OFF")
  message(STATUS "Ridgeline: CUDA ops are off (RIDGELINE_CUDA=OFF)")
  return()
elseif(NOT RIDGELINE_CUDA MATCHES "^(AUTO|ON)$")
  message(FATAL_ERROR "RIDGELINE_CUDA: expected AUTO, ON or OFF, got '${RIDGELINE_CUDA}'")
endif()

# "80,90a,90-virtual" as compiler options, one pass of the front end for each compute version: it
# yields the code of that version and the PTX. Only kernels of Hopper's own instructions, in files
# named *_sm90*, are compiled for sm_90a (RIDGELINE_GENCODE_SM90A), and those only; to the others
# 90a means sm_90: the code is the same, instruction by instruction, without a pass of its own.
string(REGEX REPLACE "[,; ]+" ";" archs "${RIDGELINE_CUDA_ARCHS}")
set(versions "")
set(has_sm90a OFF)
foreach(arch IN LISTS archs)
  if(NOT arch MATCHES "^([0-9]+[af]?)(-virtual)?$")
    message(FATAL_ERROR
      "RIDGELINE_CUDA_ARCHS: expected entries such as 80, 90a or 90-virtual, got '${arch}'")
  endif()
  set(version ${CMAKE_MATCH_1})
  set(kind sm)
  if(CMAKE_MATCH_2)
    set(kind compute)
  elseif(version STREQUAL "90a")
    set(has_sm90a ON)
    set(version 90)
  endif()
  list(APPEND versions ${version})
  list(APPEND codes_${version} ${kind}_${version})
endforeach()
list(REMOVE_DUPLICATES versions)
set(RIDGELINE_GENCODE "")
foreach(version IN LISTS versions)
  list(REMOVE_DUPLICATES codes_${version})
  list(JOIN codes_${version} "," codes)
  list(APPEND RIDGELINE_GENCODE "-gencode=arch=compute_${version},code=[${codes}]")
endforeach()
set(RIDGELINE_GENCODE_SM90A "")
if(has_sm90a)
  list(APPEND RIDGELINE_GENCODE -DRIDGELINE_SM90A)
  set(RIDGELINE_GENCODE_SM90A -gencode=arch=compute_90a,code=sm_90a -DRIDGELINE_SM90A)
endif()

# ---- The compiler -----------------------------------------------------------------------------

if(RIDGELINE_NVCC)
  set(candidates "${RIDGELINE_NVCC}")
elseif(DEFINED ENV{CUDACXX})
  set(candidates "$ENV{CUDACXX}")
else()
  execute_process(COMMAND ${Python_EXECUTABLE} -c
"import importlib.util
spec = importlib.util.find_spec('nvidia')
print(*(spec.submodule_search_locations if spec else ()), sep=';')"
    OUTPUT_VARIABLE folders OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  list(TRANSFORM folders APPEND "/cu13/bin")
  file(TO_CMAKE_PATH "$ENV{PATH}" path)
  list(PREPEND folders "$ENV{CUDA_HOME}/bin" ${path} /usr/local/cuda/bin)
  set(candidates "")
  foreach(folder IN LISTS folders)
    if(EXISTS "${folder}/nvcc")
      list(APPEND candidates "${folder}/nvcc")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES candidates)
endif()

# Sets `problem` to the reason why this nvcc cannot be used, or to nothing. It is asked to compile
# an empty kernel: that finds a missing part and a host compiler it does not know.
function(ridgeline_try_nvcc nvcc)
  execute_process(COMMAND "${nvcc}" --version
    OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE failed)
  set(version "none")
  if(text MATCHES "release ([0-9]+\\.[0-9]+)")
    set(version "${CMAKE_MATCH_1}")
  endif()
  set(problem "${nvcc} is of release ${version}, 13.0 or later is needed" PARENT_SCOPE)
  if(failed OR version STREQUAL "none" OR version VERSION_LESS 13.0)
    return()
  endif()
  set(probe "${CMAKE_CURRENT_BINARY_DIR}/generated/probe.cu")
  file(WRITE "${probe}" "__global__ void probe() {}\n")
  execute_process(COMMAND "${nvcc}" -c "${probe}" -o "${probe}.o" -std=c++20 ${RIDGELINE_GENCODE}
    -ccbin "${CMAKE_CXX_COMPILER}" OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE failed)
  if(failed)
    set(problem "${nvcc} cannot compile an empty kernel: ${text}" PARENT_SCOPE)
    return()
  endif()
  # Headers and the static runtime where this nvcc itself looks, in a toolkit or the packages.
  execute_process(COMMAND "${nvcc}" --dryrun -c "${probe}" OUTPUT_VARIABLE text ERROR_VARIABLE text)
  string(REGEX MATCH "TOP=([^\n]*)" _ "${text}")
  set(root "${CMAKE_MATCH_1}")
  string(REGEX MATCHALL "_TARGET_DIR_=[^\n]*" target "${text}")
  list(POP_BACK target target)
  string(REPLACE "_TARGET_DIR_=" "" target "${target}")
  file(REAL_PATH "${root}/${target}" root BASE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}")
  find_path(include cuda_runtime.h NO_CACHE NO_DEFAULT_PATH PATHS "${root}/include")
  find_library(cudart cudart_static NO_CACHE NO_DEFAULT_PATH PATHS "${root}/lib64" "${root}/lib")
  if(NOT include OR NOT cudart)
    set(problem "${nvcc} has no cuda_runtime.h or libcudart_static.a under ${root}" PARENT_SCOPE)
    return()
  endif()
  set(problem "" PARENT_SCOPE)
  set(nvcc_version "${version}" PARENT_SCOPE)
  set(RIDGELINE_CUDA_INCLUDE "${include}" PARENT_SCOPE)
  set(RIDGELINE_CUDART "${cudart}" PARENT_SCOPE)
endfunction()

set(problems "")
foreach(nvcc IN LISTS candidates)
  ridgeline_try_nvcc("${nvcc}")
  if(NOT problem)
    set(RIDGELINE_WITH_CUDA ON)
    set(ridgeline_nvcc "${nvcc}")
    break()
  endif()
  string(APPEND problems "\n  ${problem}")
endforeach()
if(NOT candidates)
  set(problems
    " no nvcc was found by CUDACXX, CUDA_HOME, PATH, /usr/local/cuda or package nvidia-cuda-nvcc")
endif()
if(RIDGELINE_WITH_CUDA)
  message(STATUS
    "Ridgeline: CUDA ops for ${RIDGELINE_CUDA_ARCHS} with ${ridgeline_nvcc} (${nvcc_version})")
elseif(RIDGELINE_CUDA STREQUAL "ON")
  message(FATAL_ERROR "Ridgeline: RIDGELINE_CUDA=ON, but${problems}")
else()
  message(STATUS "Ridgeline: CUDA ops are not built:${problems}")
  return()
endif()

# ---- Kernels ----------------------------------------------------------------------------------

# One object from kernel files. Several are compiled as one text, so what they name in unnamed
# namespaces must differ: each by itself costs 4 s for its headers, which are read for each
# architecture and for the host. Kernels of Hopper's own instructions, in files named so, are
# compiled for sm_90a alone and asked for only where RIDGELINE_SM90A says that it is in the build;
# on other architectures their bodies are empty. Code is compressed, which by default it is not
# where an object is for one architecture: every driver for CUDA 13 expands it as it loads it.
function(ridgeline_compile_cuda sources result)
  list(JOIN sources ", " sources_named)
  list(TRANSFORM sources PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/csrc/kernels/")
  list(TRANSFORM sources APPEND ".cu")
  list(GET sources 0 source)
  get_filename_component(stem "${source}" NAME_WE)
  set(object "${CMAKE_CURRENT_BINARY_DIR}/cuda/${stem}.o")
  list(LENGTH sources count)
  if(count GREATER 1)
    list(TRANSFORM sources REPLACE "(.+)" "#include \"\\1\"\n" OUTPUT_VARIABLE text)
    list(JOIN text "" text)
    set(source "${CMAKE_CURRENT_BINARY_DIR}/cuda/${stem}_and_others.cu")
    file(CONFIGURE OUTPUT "${source}" CONTENT "${text}" @ONLY)
  endif()
  set(gencode ${RIDGELINE_GENCODE})
  if(stem MATCHES "_sm90" AND RIDGELINE_GENCODE_SM90A)
    set(gencode ${RIDGELINE_GENCODE_SM90A})
  endif()
  set(launcher ${CMAKE_CUDA_COMPILER_LAUNCHER})
  if(NOT launcher AND DEFINED ENV{CMAKE_CUDA_COMPILER_LAUNCHER})
    set(launcher $ENV{CMAKE_CUDA_COMPILER_LAUNCHER})
  endif()
  add_custom_command(
    OUTPUT "${object}"
    COMMAND ${CMAKE_COMMAND} -E make_directory "${CMAKE_CURRENT_BINARY_DIR}/cuda"
    COMMAND ${CMAKE_COMMAND} -P "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/RidgelineNvcc.cmake" --
      ${launcher} "${ridgeline_nvcc}" -c "${source}"
      -o "${object}" -MD -MF "${object}.d" -std=c++20 -O2 ${gencode}
      -I "${CMAKE_CURRENT_SOURCE_DIR}/csrc"
      -ccbin "${CMAKE_CXX_COMPILER}" -Xcompiler=-fPIC,-fvisibility=hidden,-Wall
      --expt-relaxed-constexpr --expt-extended-lambda --compress-mode=size
      -Xptxas=--warn-on-spills,--warn-on-local-memory-usage
    DEPENDS ${sources} DEPFILE "${object}.d" JOB_POOL ridgeline_compile VERBATIM
    COMMENT "CUDA ${sources_named}")
  set(${result} "${object}" PARENT_SCOPE)
endfunction()

# The name _cuda.so needs at load time; a stand-in with that name where only a CPU torch is here.
function(ridgeline_torch_cuda_library result)
  if(EXISTS "${RIDGELINE_TORCH_LIB_DIR}/libtorch_cuda.so")
    set(${result} "${RIDGELINE_TORCH_LIB_DIR}/libtorch_cuda.so" PARENT_SCOPE)
    return()
  endif()
  set(source "${CMAKE_CURRENT_BINARY_DIR}/generated/torch_cuda_stub.cpp")
  file(CONFIGURE OUTPUT "${source}" CONTENT
    "extern \"C\" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }\n")
  set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS -fvisibility=default)
  add_library(ridgeline_torch_cuda_stub SHARED "${source}")
  set_target_properties(ridgeline_torch_cuda_stub PROPERTIES OUTPUT_NAME torch_cuda
    LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/generated")
  set(${result} ridgeline_torch_cuda_stub PARENT_SCOPE)
endfunction()

# ridgeline_add_cuda_module(name CXX files... CUDA units...), a unit: "kernel files" of csrc/kernels
function(ridgeline_add_cuda_module name)
  cmake_parse_arguments(arg "" "" "CXX;CUDA" ${ARGN})
  set(objects "")
  foreach(unit IN LISTS arg_CUDA)
    separate_arguments(unit)
    ridgeline_compile_cuda("${unit}" object)
    list(APPEND objects "${object}")
  endforeach()
  add_library(${name} MODULE ${arg_CXX} ${objects})
  set_source_files_properties(${objects} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
  set_target_properties(${name} PROPERTIES PREFIX "" SUFFIX ".so")
  target_compile_definitions(${name} PRIVATE USE_CUDA)
  if(RIDGELINE_GENCODE_SM90A)
    target_compile_definitions(${name} PRIVATE RIDGELINE_SM90A)
  endif()
  target_include_directories(${name} SYSTEM PRIVATE "${RIDGELINE_CUDA_INCLUDE}")
  ridgeline_torch_cuda_library(torch_cuda)
  target_link_libraries(${name} PRIVATE ridgeline_common ridgeline_torch ridgeline_build_info
    "${RIDGELINE_CUDART}" ${CMAKE_DL_LIBS} rt pthread)
  target_link_libraries(${name} PRIVATE
    -Wl,--push-state,--no-as-needed ${torch_cuda} -Wl,--pop-state)
  target_link_options(${name} PRIVATE -Wl,--exclude-libs,ALL -Wl,--no-undefined -s)
endfunction()
