#include "helpers.h"

#include <math.h>
#include <string.h>

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

// One definition for both element types: a row is three runs (hidden, visible, hidden), written by plain loops that the
// compiler turns into vector stores.
#define FILL_MASK(name, type, hidden)                                                                                     \
    void name(type * mask, int64_t cells, int64_t rows, int64_t sequences, const int32_t * first, int64_t window) {      \
        for (int64_t s = 0; s < sequences; ++s) {                                                                         \
            for (int64_t r = 0; r < rows; ++r, mask += cells) {                                                           \
                const int64_t position = (int64_t) first[s] + r;                                                          \
                int64_t end = position + 1 < cells ? position + 1 : cells;                                                \
                int64_t begin = window > 0 && position + 1 > window ? position + 1 - window : 0;                          \
                if (end < 0) { end = 0; }                                                                                 \
                if (begin > end) { begin = end; }                                                                         \
                for (int64_t c = 0; c < begin; ++c) { mask[c] = (hidden); }                                               \
                memset(mask + begin, 0, (size_t) (end - begin) * sizeof(type));                                           \
                for (int64_t c = end; c < cells; ++c) { mask[c] = (hidden); }                                             \
            }                                                                                                             \
        }                                                                                                                 \
    }

FILL_MASK(tsgg_fill_mask_f16, uint16_t, 0xFC00) // -inf as IEEE half
FILL_MASK(tsgg_fill_mask_f32, float, -INFINITY)

void tsgg_fill_positions(int32_t * positions, int64_t * cells, int64_t rows, int64_t sequences, const int32_t * first) {
    for (int64_t s = 0; s < sequences; ++s) {
        for (int64_t r = 0; r < rows; ++r) {
            *positions++ = first[s] + (int32_t) r;
            *cells++ = (int64_t) first[s] + r;
        }
    }
}

void tsgg_fill_elements(int64_t * elements, int64_t width, int64_t stride, int64_t rows, int64_t sequences, const int32_t * first) {
    for (int64_t s = 0; s < sequences; ++s) {
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t c = 0; c < width; ++c) {
                *elements++ = c * stride + first[s] + r;
            }
        }
    }
}
