# Torch is reached through its stable ABI alone: headers and one library, found without importing
# torch and without find_package(Torch). Sets the target ridgeline_torch and finds pybind11.
set(RIDGELINE_TORCH_DIR "" CACHE PATH
    "Folder of the torch package; empty: that of the Python in use")

if(NOT RIDGELINE_TORCH_DIR)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
"import importlib.util, os
spec = importlib.util.find_spec('torch')
print(os.path.dirname(spec.origin) if spec else '')"
    OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
else()
  set(torch_dir "${RIDGELINE_TORCH_DIR}")
endif()
if(NOT EXISTS "${torch_dir}/include/torch/csrc/stable/library.h")
  message(FATAL_ERROR "PyTorch 2.10 or later is needed to build: looked in '${torch_dir}'")
endif()

add_library(ridgeline_torch INTERFACE)
target_include_directories(ridgeline_torch SYSTEM INTERFACE "${torch_dir}/include")
target_compile_definitions(ridgeline_torch INTERFACE TORCH_TARGET_VERSION=0x020a000000000000)
target_link_libraries(ridgeline_torch INTERFACE "${torch_dir}/lib/libtorch_cpu.so")
set(RIDGELINE_TORCH_LIB_DIR "${torch_dir}/lib")

execute_process(COMMAND ${Python_EXECUTABLE} -c "import pybind11; print(pybind11.get_cmake_dir())"
  OUTPUT_VARIABLE pybind11_dir OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
if(failed)
  message(FATAL_ERROR "pybind11 is needed to build: ${Python_EXECUTABLE} -m pip install pybind11")
endif()
find_package(pybind11 CONFIG REQUIRED PATHS "${pybind11_dir}" NO_DEFAULT_PATH)
