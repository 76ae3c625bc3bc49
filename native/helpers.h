// The few loops that are too slow in Python and the proc-address look-ups that need a C function type.
#pragma once
#include "ggml-backend.h"
#include <stdbool.h>
#include <stdint.h>

// Fills `out` with at most `capacity` (name, value) pairs that the CPU backend reports; returns how many there are.
int tsgg_cpu_features(struct ggml_backend_feature * out, int capacity);

// The device's extra buffer type of that name ("CPU_REPACK"), or NULL.
ggml_backend_buffer_type_t tsgg_extra_buffer_type(ggml_backend_dev_t device, const char * name);

// A request to stop. The callback answers true once `countdown` is 1, and counts it down before; 0 is no request.
struct tsgg_interrupt {
    volatile int32_t armed;
    volatile int32_t countdown;
};

// Makes the backend ask `interrupt` (which must outlive it) between the nodes of a graph; false where it cannot.
bool tsgg_set_interrupt(ggml_backend_t backend, struct tsgg_interrupt * interrupt);

// Position p of a sequence lies in cell p % capacity. Row r of sequence s has the position first[s] + r; the rows of a step
// are written before they are read.
//
// Writes an attention mask [sequences][rows][cells]: 0 where the row may see what the cell holds (a position that is not
// later, and less than `window` back when window > 0), -inf elsewhere. cells <= capacity.
void tsgg_fill_mask_f16(uint16_t * mask, int64_t cells, int64_t capacity, int64_t rows, int64_t sequences,
                        const int32_t * first, int64_t window);
void tsgg_fill_mask_f32(float * mask, int64_t cells, int64_t capacity, int64_t rows, int64_t sequences,
                        const int32_t * first, int64_t window);

// `positions` and `cells` [sequences][rows]: of every row. `elements` [sequences][rows][width]: where channel c of a row
// lies in a transposed cache, c * capacity + its cell.
void tsgg_fill_positions(int32_t * positions, int64_t rows, int64_t sequences, const int32_t * first);
void tsgg_fill_cells(int64_t * cells, int64_t capacity, int64_t rows, int64_t sequences, const int32_t * first);
void tsgg_fill_elements(int64_t * elements, int64_t width, int64_t capacity, int64_t rows, int64_t sequences, const int32_t * first);

// Asks for huge pages where the system hands them out on request (Linux); of memory that nobody has touched yet.
void tsgg_huge_pages(void * memory, size_t bytes);
