// The module tsgg._cpu: `features()`, names of the CPU features that this processor and its system have, and `variants`.
// Compiled without any of them: it decides which extension may be loaded.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <cpuid.h>
#include <stdint.h>

struct registers {
    unsigned a, b, c, d;
};

static struct registers cpuid(unsigned leaf, unsigned subleaf) {
    struct registers r = {0, 0, 0, 0};
    __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d); // zeros where the processor has no such leaf
    return r;
}

// Registers that the system saves when threads change: a feature whose registers it does not save cannot be used.
static uint64_t saved_registers(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t) high << 32) | low;
}

static int has(unsigned word, unsigned bits) {
    return (word & bits) == bits;
}

static PyObject * features(PyObject * self, PyObject * arguments) {
    (void) self;
    (void) arguments;
    const struct registers one = cpuid(1, 0), seven = cpuid(7, 0), more = cpuid(7, 1);
    const uint64_t saved = has(one.c, 1u << 27) ? saved_registers() : 0;
    const int avx = (saved & 0x06) == 0x06 && has(one.c, 1u << 28);
    const int avx512 = avx && (saved & 0xe6) == 0xe6 &&
                       has(seven.b, 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31); // F, DQ, CD, BW, VL
    const struct {
        const char * name;
        int there;
    } known[] = {
        {"SSE42", has(one.c, 1u << 20 | 1u << 23)}, // with POPCNT: the compiler uses both
        {"F16C", avx && has(one.c, 1u << 29)},
        {"FMA", avx && has(one.c, 1u << 12)},
        {"AVX", avx},
        {"AVX2", avx && has(seven.b, 1u << 5)},
        {"BMI2", has(seven.b, 1u << 8)},
        {"AVX_VNNI", avx && has(more.a, 1u << 4)},
        {"AVX512", avx512},
        {"AVX512_VBMI", avx512 && has(seven.c, 1u << 1)},
        {"AVX512_VNNI", avx512 && has(seven.c, 1u << 11)},
        {"AVX512_BF16", avx512 && has(more.a, 1u << 5)},
    };
    PyObject * names = PyList_New(0);
    for (size_t i = 0; names != NULL && i < sizeof known / sizeof known[0]; ++i) {
        PyObject * name = known[i].there ? PyUnicode_FromString(known[i].name) : NULL;
        if (known[i].there && (name == NULL || PyList_Append(names, name) < 0)) {
            Py_CLEAR(names);
        }
        Py_XDECREF(name);
    }
    return names;
}

static PyMethodDef methods[] = {
    {"features", features, METH_NOARGS, "Names of the CPU features that this processor and its system have."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "tsgg._cpu", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__cpu(void) {
    PyObject * module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddStringConstant(module, "variants", TSGG_VARIANTS) < 0) {
        Py_CLEAR(module);
    }
    return module;
}
