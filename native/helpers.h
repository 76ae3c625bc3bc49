// The few loops that are too slow in Python and the proc-address look-ups that need a C function type.
#pragma once
#include "ggml-backend.h"
#include <stdint.h>

// Fills `out` with at most `capacity` (name, value) pairs that the CPU backend reports; returns how many there are.
int tsgg_cpu_features(struct ggml_backend_feature * out, int capacity);

// The device's extra buffer type of that name ("CPU_REPACK"), or NULL.
ggml_backend_buffer_type_t tsgg_extra_buffer_type(ggml_backend_dev_t device, const char * name);

// Writes an attention mask [sequences][rows][cells]: 0 where row r of sequence s (position first[s] + r) may see the cell
// of that number (cell <= position, and position - cell < window when window > 0), -inf elsewhere.
void tsgg_fill_mask_f16(uint16_t * mask, int64_t cells, int64_t rows, int64_t sequences, const int32_t * first, int64_t window);
void tsgg_fill_mask_f32(float * mask, int64_t cells, int64_t rows, int64_t sequences, const int32_t * first, int64_t window);

// Numbers of the rows of B sequences x T rows: `positions` (int32) and `cells` (int64), both [sequences][rows], are
// first[s] + r. `elements` [sequences][rows][width]: element c * stride + (first[s] + r) of a transposed cache.
void tsgg_fill_positions(int32_t * positions, int64_t * cells, int64_t rows, int64_t sequences, const int32_t * first);
void tsgg_fill_elements(int64_t * elements, int64_t width, int64_t stride, int64_t rows, int64_t sequences, const int32_t * first);
