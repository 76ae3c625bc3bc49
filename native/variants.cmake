# x86-64 Linux: the CPU backend is compiled once per set of CPU features, each set inside an extension of its own,
# `tsgg._ggml_NAME`. `tsgg/ggml/variants.py` loads the best one that the processor runs; cpu.c knows what it runs.
#
# ggml's own way (GGML_CPU_ALL_VARIANTS) needs shared libraries, which another ggml in the process could replace.

set(TSGG_CPU_VARIANTS "auto" CACHE STRING
    "auto, all, a list of the names below, or native: one extension for this machine's CPU")

set(TSGG_SSE42_FLAGS -msse4.2)
set(TSGG_F16C_FLAGS -mf16c)
set(TSGG_FMA_FLAGS -mfma)
set(TSGG_BMI2_FLAGS -mbmi2)
set(TSGG_AVX2_FLAGS -mavx2)
set(TSGG_AVX_VNNI_FLAGS -mavxvnni)
set(TSGG_AVX512_FLAGS -mavx512f -mavx512cd -mavx512vl -mavx512dq -mavx512bw)
set(TSGG_AVX512_VBMI_FLAGS -mavx512vbmi)
set(TSGG_AVX512_VNNI_FLAGS -mavx512vnni)
set(TSGG_AVX512_BF16_FLAGS -mavx512bf16)

# Best first; names as in ggml. A processor runs the first whose features it has.
set(TSGG_KNOWN_VARIANTS zen4 icelake skylakex alderlake haswell sse42)
set(TSGG_sse42_FEATURES SSE42)
set(TSGG_haswell_FEATURES SSE42 F16C FMA BMI2 AVX2)
set(TSGG_alderlake_FEATURES ${TSGG_haswell_FEATURES} AVX_VNNI)
set(TSGG_skylakex_FEATURES ${TSGG_haswell_FEATURES} AVX512)
set(TSGG_icelake_FEATURES ${TSGG_skylakex_FEATURES} AVX512_VBMI AVX512_VNNI)
set(TSGG_zen4_FEATURES ${TSGG_icelake_FEATURES} AVX512_BF16)

if(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$" AND CMAKE_SIZEOF_VOID_P EQUAL 8)
    set(TSGG_X86 ON)
    execute_process(COMMAND ${CMAKE_C_COMPILER} -march=native -dM -E -x c /dev/null
                    OUTPUT_VARIABLE TSGG_NATIVE_MACROS ERROR_QUIET)
endif()

# Sets `out` to the names to build, best first; empty: one extension, with ggml's own options.
function(tsgg_choose_variants out)
    set(${out} "" PARENT_SCOPE)
    if(NOT TSGG_X86 OR TSGG_CPU_VARIANTS STREQUAL "native")
        return()
    endif()
    foreach(device BLAS CANN CUDA HEXAGON HIP MUSA OPENCL OPENVINO RPC SYCL VULKAN WEBGPU ZDNN ZENDNN)
        if(GGML_${device})
            return() # every extension would hold a copy of that backend
        endif()
    endforeach()
    if(TSGG_CPU_VARIANTS STREQUAL "all")
        set(wanted ${TSGG_KNOWN_VARIANTS})
    elseif(TSGG_CPU_VARIANTS STREQUAL "auto")
        set(wanted icelake haswell sse42)
        if(TSGG_NATIVE_MACROS MATCHES "__AVX512BF16__") # what those three lack of this machine
            list(APPEND wanted zen4)
        elseif(TSGG_NATIVE_MACROS MATCHES "__AVX512F__" AND NOT TSGG_NATIVE_MACROS MATCHES "__AVX512VNNI__")
            list(APPEND wanted skylakex)
        elseif(TSGG_NATIVE_MACROS MATCHES "__AVXVNNI__" AND NOT TSGG_NATIVE_MACROS MATCHES "__AVX512F__")
            list(APPEND wanted alderlake)
        endif()
    else()
        set(wanted ${TSGG_CPU_VARIANTS})
    endif()
    set(chosen "")
    foreach(name IN LISTS TSGG_KNOWN_VARIANTS)
        if(name IN_LIST wanted)
            list(APPEND chosen ${name})
            list(REMOVE_ITEM wanted ${name})
        endif()
    endforeach()
    if(wanted)
        message(FATAL_ERROR "TSGG_CPU_VARIANTS: ${wanted} is none of auto, all, native, ${TSGG_KNOWN_VARIANTS}")
    endif()
    set(${out} ${chosen} PARENT_SCOPE)
endfunction()

# A static library like ggml's target `ggml-cpu`, which was configured without CPU features, with those of the variant.
function(tsgg_add_cpu_backend name)
    get_target_property(folder ggml-cpu SOURCE_DIR)
    get_target_property(sources ggml-cpu SOURCES)
    list(TRANSFORM sources PREPEND "${folder}/" REGEX "^[^/]")
    add_library(ggml-cpu-${name} STATIC EXCLUDE_FROM_ALL ${sources})
    foreach(property COMPILE_DEFINITIONS COMPILE_FEATURES COMPILE_OPTIONS C_STANDARD CXX_STANDARD INCLUDE_DIRECTORIES
                     LINK_LIBRARIES)
        get_target_property(value ggml-cpu ${property})
        if(value)
            set_property(TARGET ggml-cpu-${name} PROPERTY ${property} ${value})
        endif()
    endforeach()
    get_directory_property(definitions DIRECTORY "${folder}" COMPILE_DEFINITIONS)
    target_compile_definitions(ggml-cpu-${name} PRIVATE ${definitions})
    foreach(feature IN LISTS TSGG_${name}_FEATURES)
        target_compile_options(ggml-cpu-${name} PRIVATE ${TSGG_${feature}_FLAGS})
    endforeach()
endfunction()

# What ggml's target `ggml` links then: everything but the CPU backend, which each extension brings.
function(tsgg_detach_cpu_backend)
    foreach(property LINK_LIBRARIES INTERFACE_LINK_LIBRARIES)
        get_target_property(value ggml ${property})
        list(REMOVE_ITEM value ggml-cpu)
        set_property(TARGET ggml PROPERTY ${property} ${value})
    endforeach()
endfunction()

# What the one extension needs of a processor: all that ggml's options let the compiler use, as far as it has a name here.
function(tsgg_native_features out)
    set(features "")
    foreach(pair SSE42=__SSE4_2__ F16C=__F16C__ FMA=__FMA__ BMI2=__BMI2__ AVX2=__AVX2__ AVX_VNNI=__AVXVNNI__
                 AVX512=__AVX512F__ AVX512_VBMI=__AVX512VBMI__ AVX512_VNNI=__AVX512VNNI__ AVX512_BF16=__AVX512BF16__)
        string(REPLACE "=" ";" pair ${pair})
        list(GET pair 0 feature)
        list(GET pair 1 macro)
        if(GGML_${feature} OR (GGML_NATIVE AND TSGG_NATIVE_MACROS MATCHES "${macro} "))
            list(APPEND features ${feature})
        endif()
    endforeach()
    set(${out} ${features} PARENT_SCOPE)
endfunction()

# The module tsgg._cpu: what this processor has, and what was built and needs what ("icelake:SSE42,F16C haswell:...").
function(tsgg_add_cpu_module)
    set(table "")
    foreach(name IN LISTS ARGN)
        string(REPLACE ";" "," features "${TSGG_${name}_FEATURES}")
        string(APPEND table "${name}:${features} ")
    endforeach()
    Python_add_library(_cpu MODULE WITH_SOABI USE_SABI 3.10 cpu.c)
    target_compile_definitions(_cpu PRIVATE "TSGG_VARIANTS=\"${table}\"")
    set_target_properties(_cpu PROPERTIES C_VISIBILITY_PRESET hidden)
    install(TARGETS _cpu DESTINATION tsgg)
endfunction()
