#include "tiles.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define INLINE AVX2 __attribute__((always_inline)) static inline

#define BLOCK 32 // weights that share a scale and a minimum, in the file and here
#define GROUP 4  // rows of x that are multiplied by weights unpacked once: more would not fit into the registers

// As the file has them: w = d * q + m, with q[i] in the low half of quants[i] and q[16 + i] in the high half.
struct q4_1 {
    uint16_t d, m;
    uint8_t quants[BLOCK / 2];
};

// The same blocks of eight rows. quants[j][r] holds the bytes 4j .. 4j + 3 of row r, so that one register has the same four
// columns of all eight rows, and one broadcast of four activations serves it.
struct tile {
    uint16_t d[TSGG_TILE_ROWS], m[TSGG_TILE_ROWS];
    uint8_t quants[4][TSGG_TILE_ROWS][4];
};

// Of 32 activations x = d * q: the weights' minimum is multiplied by their sum.
struct scale {
    float d, sum;
};

// A thread's copy of rows of x as 8-bit integers. Every thread makes its own: a row takes less time than to wait for another
// thread to have made it.
#define SCRATCH (128 << 10)
static _Thread_local _Alignas(64) uint8_t scratch[SCRATCH];
#define MOST_ROWS 64     // of x at a time
#define RUN (48 << 10)   // bytes of tiles that stay in the cache while all rows of x go by
#define PIECES 8         // into which the tiles of a matrix are cut for the threads

struct rows {
    const int8_t * quants[GROUP];
    const struct scale * scales[GROUP];
    float * out[GROUP];
};

bool tsgg_tiles_run(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

void tsgg_tile_q4_1(const void * matrix, void * tiles, int64_t columns, int64_t n_rows) {
    const int64_t blocks = columns / BLOCK;
    struct tile * tile = tiles;
    for (int64_t first = 0; first < n_rows; first += TSGG_TILE_ROWS) {
        for (int64_t b = 0; b < blocks; ++b, ++tile) {
            for (int r = 0; r < TSGG_TILE_ROWS; ++r) {
                const struct q4_1 * block = (const struct q4_1 *) matrix + (first + r) * blocks + b;
                tile->d[r] = block->d;
                tile->m[r] = block->m;
                for (int j = 0; j < 4; ++j) {
                    memcpy(tile->quants[j][r], block->quants + 4 * j, 4);
                }
            }
        }
    }
}

INLINE float largest(__m256 x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

INLINE int32_t total(__m256i x) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}

// One row of x, by the same rule as ggml's Q8_1.
AVX2 static void quantize(const float * x, int64_t columns, int8_t * quants, struct scale * scales) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
    for (int64_t b = 0; b < columns / BLOCK; ++b, x += BLOCK, quants += BLOCK, ++scales) {
        __m256 v[4], most = _mm256_setzero_ps();
        for (int i = 0; i < 4; ++i) {
            v[i] = _mm256_loadu_ps(x + 8 * i);
            most = _mm256_max_ps(most, _mm256_and_ps(v[i], magnitude));
        }
        const float d = largest(most) / 127.0f;
        const __m256 inverse = _mm256_set1_ps(d == 0.0f ? 0.0f : 1.0f / d);
        __m256i q[4], sum = _mm256_setzero_si256();
        for (int i = 0; i < 4; ++i) {
            q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
            sum = _mm256_add_epi32(sum, q[i]);
        }
        // The packs work in halves of a register; the permutation puts the 32 back in order.
        const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_storeu_si256((__m256i *) quants, _mm256_permutevar8x32_epi32(bytes, order));
        scales->d = d;
        scales->sum = d * (float) total(sum);
    }
}

// Eight weight rows times `count` rows of x. Sums of one pair of rows are made in the same order whatever `count` is.
INLINE void multiply(const struct tile * tile, int64_t blocks, const struct rows * rows, const int count) {
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256 sums[GROUP];
    for (int c = 0; c < count; ++c) {
        sums[c] = _mm256_setzero_ps();
    }
    for (int64_t b = 0; b < blocks; ++b, ++tile) {
        // Pairs of products, at most 2 * 15 * 127 = 3810: the eight of a block fit into 16 bits.
        __m256i pairs[GROUP];
        for (int c = 0; c < count; ++c) {
            pairs[c] = _mm256_setzero_si256();
        }
        for (int j = 0; j < 4; ++j) {
            const __m256i packed = _mm256_loadu_si256((const __m256i *) tile->quants[j]);
            const __m256i first = _mm256_and_si256(packed, low);
            const __m256i second = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low);
            for (int c = 0; c < count; ++c) {
                int32_t four[2];
                memcpy(four, rows->quants[c] + b * BLOCK + 4 * j, 4);
                memcpy(four + 1, rows->quants[c] + b * BLOCK + 16 + 4 * j, 4);
                pairs[c] = _mm256_add_epi16(pairs[c], _mm256_maddubs_epi16(first, _mm256_set1_epi32(four[0])));
                pairs[c] = _mm256_add_epi16(pairs[c], _mm256_maddubs_epi16(second, _mm256_set1_epi32(four[1])));
            }
        }
        const __m256 d = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) tile->d));
        const __m256 m = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) tile->m));
        for (int c = 0; c < count; ++c) {
            const struct scale * scale = rows->scales[c] + b;
            const __m256 products = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs[c], ones));
            sums[c] = _mm256_fmadd_ps(products, _mm256_mul_ps(d, _mm256_set1_ps(scale->d)), sums[c]);
            sums[c] = _mm256_fmadd_ps(m, _mm256_set1_ps(scale->sum), sums[c]);
        }
    }
    for (int c = 0; c < count; ++c) {
        _mm256_storeu_ps(rows->out[c], sums[c]);
    }
}

// Tiles first .. end - 1 times `count` rows of x, to the rows of y from `row` on.
AVX2 static void multiply_run(struct ggml_tensor * y, int64_t first, int64_t end, int64_t row, int count,
                              const int8_t * quants, const struct scale * scales) {
    const int64_t columns = y->src[0]->ne[0], blocks = columns / BLOCK;
    const struct tile * tile = (const struct tile *) y->src[0]->data + first * blocks;
    struct rows rows;
    for (int c = 0; c < count; ++c) {
        rows.quants[c] = quants + c * columns;
        rows.scales[c] = scales + c * blocks;
        rows.out[c] = (float *) ((char *) y->data + (row + c) * y->nb[1]) + first * TSGG_TILE_ROWS;
    }
    for (; first < end; ++first, tile += blocks) {
        switch (count) {
            case 1: multiply(tile, blocks, &rows, 1); break;
            case 2: multiply(tile, blocks, &rows, 2); break;
            case 3: multiply(tile, blocks, &rows, 3); break;
            default: multiply(tile, blocks, &rows, 4); break;
        }
        for (int c = 0; c < count; ++c) {
            rows.out[c] += TSGG_TILE_ROWS;
        }
    }
}

// The number of the piece that the next free thread takes. It lies in the node's own parameters, behind those of ggml's custom
// operation, which are zero when the node is made.
#define COUNTER 8 // an index of op_params

static int take_piece(struct ggml_tensor * y) {
    return __atomic_fetch_add(&y->op_params[COUNTER], 1, __ATOMIC_RELAXED);
}

// Every thread ends with one number that is no piece; the last of them leaves the counter as the next compute wants it.
static void leave_pieces(struct ggml_tensor * y, int number, int pieces, int threads) {
    if (number == pieces + threads - 1) {
        __atomic_store_n(&y->op_params[COUNTER], 0, __ATOMIC_RELAXED);
    }
}

// What ggml's threads run. A piece is an eighth of the tiles for MOST_ROWS rows of x. Threads take pieces as they come free:
// with a fixed half each, all would wait for the one whose core another program has taken.
AVX2 static void mul_tiles(struct ggml_tensor * y, int thread, int threads, void * nothing) {
    (void) thread, (void) nothing;
    const struct ggml_tensor * weights = y->src[0], * x = y->src[1];
    const int64_t columns = weights->ne[0], blocks = columns / BLOCK, tiles = weights->ne[1] / TSGG_TILE_ROWS;
    const int64_t row_bytes = columns + blocks * (int64_t) sizeof(struct scale);
    int64_t most = SCRATCH / row_bytes;
    most = most < MOST_ROWS ? most : MOST_ROWS;
    const int64_t run = RUN / (blocks * (int64_t) sizeof(struct tile)), together = run > 1 ? run : 1;
    const int pieces = (int) ((x->ne[1] + most - 1) / most) * PIECES;
    int64_t quantized = -1; // the first of the rows whose copy lies in `scratch`
    int number = take_piece(y);
    for (; number < pieces; number = take_piece(y)) {
        const int64_t at = number / PIECES * most, piece = number % PIECES;
        const int64_t first = tiles * piece / PIECES, end = tiles * (piece + 1) / PIECES;
        const int64_t count = x->ne[1] - at < most ? x->ne[1] - at : most;
        struct scale * scales = (struct scale *) scratch;
        int8_t * quants = (int8_t *) (scales + count * blocks);
        for (int64_t i = 0; quantized != at && i < count; ++i) {
            const float * row = (const float *) ((const char *) x->data + (at + i) * x->nb[1]);
            quantize(row, columns, quants + i * columns, scales + i * blocks);
        }
        quantized = at;
        for (int64_t t = first; t < end; t += together) {
            const int64_t last = end - t < together ? end : t + together;
            for (int64_t i = 0; i < count; i += GROUP) {
                multiply_run(y, t, last, at + i, count - i < GROUP ? (int) (count - i) : GROUP, quants + i * columns, scales + i * blocks);
            }
        }
    }
    leave_pieces(y, number, pieces, threads);
}

struct ggml_tensor * tsgg_mul_tiles(struct ggml_context * ctx, struct ggml_tensor * tiles, struct ggml_tensor * x) {
    struct ggml_tensor * operands[] = {tiles, x};
    return ggml_custom_4d(ctx, GGML_TYPE_F32, tiles->ne[1], x->ne[1], 1, 1, operands, 2, mul_tiles, GGML_N_TASKS_MAX, NULL);
}

#else

bool tsgg_tiles_run(void) {
    return false;
}

void tsgg_tile_q4_1(const void * matrix, void * tiles, int64_t columns, int64_t n_rows) {
    (void) matrix, (void) tiles, (void) columns, (void) n_rows;
}

struct ggml_tensor * tsgg_mul_tiles(struct ggml_context * ctx, struct ggml_tensor * tiles, struct ggml_tensor * x) {
    return ggml_mul_mat(ctx, tiles, x); // never reached: nothing is regrouped
}

#endif
