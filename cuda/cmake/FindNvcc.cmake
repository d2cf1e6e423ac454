# Finds a CUDA compiler that works, chooses the architectures and enables the language, or sets
# JR_CUDA_REASON and JR_CUDA_REMEDY.

execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/find_nvcc.py"
  OUTPUT_VARIABLE JR_NVCC OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT JR_NVCC)
  set(JR_CUDA_REASON
    "the build found no nvcc on PATH, in CUDA_HOME or in NVIDIA's Python packages")
  set(JR_CUDA_REMEDY "install CUDA's compiler, or point CUDA_HOME to it")
  return()
endif()

execute_process(
  COMMAND "${JR_NVCC}" --list-gpu-code
  OUTPUT_VARIABLE known ERROR_VARIABLE error RESULT_VARIABLE result
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
if(NOT result EQUAL 0 OR NOT known MATCHES "sm_")
  string(STRIP "${JR_NVCC} does not run (exit status ${result}) ${error}" JR_CUDA_REASON)
  set(JR_CUDA_REMEDY "repair this CUDA toolkit, or point CUDA_HOME to another")
  return()
endif()

# The architectures that we want, of those that this nvcc knows. Machine code for each; PTX for the
# oldest and the newest, for GPUs between and after them.
if(JR_CUDA_ARCHITECTURES STREQUAL "all")
  set(wanted 75 80 86 89 90 100 120)
else()
  string(REPLACE "." "" wanted "${JR_CUDA_ARCHITECTURES}")
  string(REGEX REPLACE "[, ]+" ";" wanted "${wanted}")
endif()
list(SORT wanted COMPARE NATURAL)
set(architectures "")
foreach(architecture IN LISTS wanted)
  if("${known}\n" MATCHES "sm_${architecture}\n")
    list(APPEND architectures ${architecture})
  elseif(NOT JR_CUDA_ARCHITECTURES STREQUAL "all")
    message(FATAL_ERROR "JR_CUDA_ARCHITECTURES names ${architecture}, which ${JR_NVCC} does not know")
  endif()
endforeach()
list(GET architectures 0 oldest)
list(GET architectures -1 newest)
list(TRANSFORM architectures APPEND "-real")
set(CMAKE_CUDA_ARCHITECTURES ${architectures} ${oldest}-virtual ${newest}-virtual)
list(REMOVE_DUPLICATES CMAKE_CUDA_ARCHITECTURES)

set(ENV{CUDACXX} "${JR_NVCC}")
# NVIDIA's Python packages keep in lib what nvcc looks for in lib64.
get_filename_component(JR_CUDA_LIBRARY_DIR "${JR_NVCC}/../../lib" ABSOLUTE)
if(EXISTS "${JR_CUDA_LIBRARY_DIR}/libcudart_static.a")
  set(ENV{CUDAFLAGS} "$ENV{CUDAFLAGS} -L\"${JR_CUDA_LIBRARY_DIR}\"")
  link_directories("${JR_CUDA_LIBRARY_DIR}")
endif()

# check_language tries the compiler in a project of its own, where a failure (a host compiler that is
# too new, a part of the toolkit that is missing) can be told instead of ending the build.
if(NOT CMAKE_CUDA_COMPILER)
  unset(CMAKE_CUDA_COMPILER CACHE)
endif()
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  set(JR_CUDA_REASON "${JR_NVCC} does not compile and link with ${CMAKE_CXX_COMPILER}")
  set(JR_CUDA_REMEDY
    "compile a small file with it to find out why, or point CUDAHOSTCXX to another C++ compiler")
  return()
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.1)
  set(JR_CUDA_REASON
    "${JR_NVCC} is CUDA ${CMAKE_CUDA_COMPILER_VERSION}, and 12.1 is the oldest supported")
  set(JR_CUDA_REMEDY "install a newer CUDA toolkit, or point CUDA_HOME to one")
endif()
