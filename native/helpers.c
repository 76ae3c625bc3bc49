#include "helpers.h"

#include <math.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

int tsgg_cpu_features(struct ggml_backend_feature * out, int capacity) {
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (device == NULL) {
        return 0;
    }
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
    ggml_backend_get_features_t get =
        (ggml_backend_get_features_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features");
    if (get == NULL) {
        return 0;
    }
    int n = 0;
    for (struct ggml_backend_feature * feature = get(reg); feature->name != NULL; ++feature, ++n) {
        if (n < capacity) {
            out[n] = *feature;
        }
    }
    return n;
}

ggml_backend_buffer_type_t tsgg_extra_buffer_type(ggml_backend_dev_t device, const char * name) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
    ggml_backend_dev_get_extra_bufts_t get =
        (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts");
    if (get == NULL) {
        return NULL;
    }
    for (ggml_backend_buffer_type_t * type = get(device); type != NULL && *type != NULL; ++type) {
        if (strcmp(ggml_backend_buft_name(*type), name) == 0) {
            return *type;
        }
    }
    return NULL;
}

static bool interrupted(void * data) {
    struct tsgg_interrupt * interrupt = data;
    if (interrupt->armed == 0 || interrupt->countdown == 0) {
        return false;
    }
    if (interrupt->countdown == 1) {
        return true;
    }
    interrupt->countdown -= 1;
    return false;
}

bool tsgg_set_interrupt(ggml_backend_t backend, struct tsgg_interrupt * interrupt) {
    ggml_backend_dev_t device = ggml_backend_get_device(backend);
    ggml_backend_reg_t reg = device == NULL ? NULL : ggml_backend_dev_backend_reg(device);
    ggml_backend_set_abort_callback_t set =
        reg == NULL ? NULL
                    : (ggml_backend_set_abort_callback_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_abort_callback");
    if (set == NULL) {
        return false;
    }
    set(backend, interrupted, interrupt);
    return true;
}

// One definition for both element types. Written cells hold, of the positions that fall on them, the latest up to the
// step's last row; so going down from there the visible positions of a row are one run, which wraps at most once.
#define FILL_MASK(name, type, hidden)                                                                                     \
    void name(type * mask, int64_t cells, int64_t capacity, int64_t rows, int64_t sequences, const int32_t * first,       \
              int64_t window) {                                                                                            \
        for (int64_t s = 0; s < sequences; ++s) {                                                                         \
            const int64_t last = (int64_t) first[s] + rows - 1;                                                           \
            const int64_t oldest = last + 1 > capacity ? last + 1 - capacity : 0;                                         \
            for (int64_t r = 0; r < rows; ++r, mask += cells) {                                                           \
                const int64_t position = (int64_t) first[s] + r;                                                          \
                int64_t begin = window > 0 && position + 1 > window ? position + 1 - window : 0;                          \
                if (begin < oldest) { begin = oldest; }                                                                   \
                const int64_t from = begin % capacity, to = position % capacity + 1;                                      \
                if (from < to) {                                                                                          \
                    fill_##name(mask, 0, from, hidden);                                                                   \
                    fill_##name(mask, from, to, 0);                                                                       \
                    fill_##name(mask, to, cells, hidden);                                                                 \
                } else {                                                                                                  \
                    fill_##name(mask, 0, to, 0);                                                                          \
                    fill_##name(mask, to, from, hidden);                                                                  \
                    fill_##name(mask, from, cells, 0);                                                                    \
                }                                                                                                         \
            }                                                                                                             \
        }                                                                                                                 \
    }

#define FILL(name, type)                                                                                                  \
    static void fill_##name(type * mask, int64_t from, int64_t to, type value) {                                          \
        for (int64_t c = from; c < to; ++c) { mask[c] = value; }                                                          \
    }

FILL(tsgg_fill_mask_f16, uint16_t)
FILL(tsgg_fill_mask_f32, float)
FILL_MASK(tsgg_fill_mask_f16, uint16_t, 0xFC00) // -inf as IEEE half
FILL_MASK(tsgg_fill_mask_f32, float, -INFINITY)

void tsgg_fill_positions(int32_t * positions, int64_t rows, int64_t sequences, const int32_t * first) {
    for (int64_t s = 0; s < sequences; ++s) {
        for (int64_t r = 0; r < rows; ++r) {
            *positions++ = first[s] + (int32_t) r;
        }
    }
}

void tsgg_fill_cells(int64_t * cells, int64_t capacity, int64_t rows, int64_t sequences, const int32_t * first) {
    for (int64_t s = 0; s < sequences; ++s) {
        for (int64_t r = 0; r < rows; ++r) {
            *cells++ = (first[s] + r) % capacity;
        }
    }
}

void tsgg_fill_elements(int64_t * elements, int64_t width, int64_t capacity, int64_t rows, int64_t sequences, const int32_t * first) {
    for (int64_t s = 0; s < sequences; ++s) {
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t cell = (first[s] + r) % capacity;
            for (int64_t c = 0; c < width; ++c) {
                *elements++ = c * capacity + cell;
            }
        }
    }
}

void tsgg_huge_pages(void * memory, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = (uintptr_t) sysconf(_SC_PAGESIZE);
    const uintptr_t first = ((uintptr_t) memory + page - 1) & ~(page - 1);
    const uintptr_t end = ((uintptr_t) memory + bytes) & ~(page - 1);
    if (end > first) {
        madvise((void *) first, end - first, MADV_HUGEPAGE);  // a wish: without them all works as well
    }
#else
    (void) memory;
    (void) bytes;
#endif
}
