# find_package(Torch) of a CUDA build looks for the toolkit beside nvcc. Where the nvcc on PATH is a wrapper script in
# another folder it finds nothing, so ask nvcc itself where it lives.
if(NOT CUDA_TOOLKIT_ROOT_DIR AND NOT DEFINED ENV{CUDA_HOME})
  find_program(WEAKREF_EXT_NVCC nvcc)
  mark_as_advanced(WEAKREF_EXT_NVCC)
  if(WEAKREF_EXT_NVCC)
    execute_process(COMMAND ${WEAKREF_EXT_NVCC} --dryrun x.cu ERROR_VARIABLE _dryrun OUTPUT_QUIET)
    if(_dryrun MATCHES "#\\$ TOP=([^\n]+)")
      get_filename_component(_root "${CMAKE_MATCH_1}" ABSOLUTE)
      set(CUDA_TOOLKIT_ROOT_DIR "${_root}" CACHE PATH "Root of the CUDA toolkit")
      set(CMAKE_CUDA_COMPILER "${_root}/bin/nvcc" CACHE FILEPATH "CUDA compiler")
    endif()
  endif()
endif()
