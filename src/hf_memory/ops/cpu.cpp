// Rows in 8 bits on a CPU: packing them, and attention of one token to them. See bits.py and attention_in_bits. And the
// norms and rotations of one token, which are several operations of PyTorch.
//
// A packed row is its scale in bfloat16 and then a code of 8 bits for each channel. Codes become numbers in registers,
// so that little is written but the scores of a head.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

const int SCALE = 2;    // bytes of the scale of a row
const float MOST = 127; // the largest code
const float SMALLEST = 1.17549435e-38f;
const int WIDEST = 256; // channels of a head
const int TOGETHER = 4; // queries of a head that are read together, at most
const int LANES = 48;   // the same at the end of a block, a multiple of the numbers of a register
// as in kv_eviction/policies.py
const float DECAY = 0.8;
const float LEAST_REST = 1e-3;

struct BFloat16 {
  uint16_t bits;
};

float number_of(float x) { return x; }

float number_of(BFloat16 x) {
  const uint32_t wide = (uint32_t)x.bits << 16;
  float found;
  memcpy(&found, &wide, 4);
  return found;
}

BFloat16 rounded(float x) {
  uint32_t wide;
  memcpy(&wide, &x, 4);
  if (x != x) return {0x7FC0};
  return {(uint16_t)((wide + 0x7FFF + (wide >> 16 & 1)) >> 16)};
}

void store(float *to, float x) { *to = x; }
void store(BFloat16 *to, float x) { *to = rounded(x); }

float scale_of(const uint8_t *row) {
  BFloat16 found;
  memcpy(&found, row, SCALE);
  return number_of(found);
}

// e^x of x <= 0, to the precision of float; a loop over it needs neither calls nor branches.
inline float exponential(float x) {
  x = x < -88 ? -88 : x; // whose power below is zero
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = std::fma(n, 2.12194440e-4f, std::fma(n, -0.693359375f, x));
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1;
  const int32_t bits = ((int32_t)n + 127) << 23;
  float power;
  memcpy(&power, &bits, 4);
  return p * power;
}

// A row times orthonormal Hadamard matrices, one for each block of channels, in place.
template <class T> void rotate(T *x, int D) {
  const int size = D & -D;
  const T factor = 1 / std::sqrt((T)size);
  for (int i = 0; i < D; ++i) x[i] *= factor; // first, so that no sum is larger than what is found
  for (int half = 1; half < size; half *= 2)
    for (int start = 0; start < D; start += 2 * half)
      for (int i = start; i < start + half; ++i) {
        const T first = x[i];
        const T second = x[i + half];
        x[i] = first + second;
        x[i + half] = first - second;
      }
}

template <class T> void pack(int64_t rows, int D, const T *x, uint8_t *packed) {
  double rotated[WIDEST];
  for (int64_t row = 0; row < rows; ++row, x += D, packed += SCALE + D) {
    for (int i = 0; i < D; ++i) rotated[i] = number_of(x[i]);
    rotate(rotated, D);
    double largest = 0;
    for (int i = 0; i < D; ++i) {
      const double size = std::fabs(rotated[i]);
      largest = size > largest || size != size ? size : largest;
    }
    float scale = (float)(largest / MOST);
    const BFloat16 kept = rounded(scale < SMALLEST ? SMALLEST : scale);
    memcpy(packed, &kept, SCALE);
    scale = number_of(kept);
    const bool is_finite = std::isfinite(scale);
    for (int i = 0; i < D; ++i)
      packed[SCALE + i] = is_finite ? (uint8_t)(int8_t)std::nearbyint(rotated[i] / scale) : 0;
  }
}

// Rows x [rows, D] divided by the root of their mean square, times a weight [D].
template <class T> void rms_norm(int64_t rows, int64_t D, const T *x, const T *weight, float eps, T *y) {
  for (int64_t row = 0; row < rows; ++row, x += D, y += D) {
    float sum = 0;
    for (int64_t d = 0; d < D; ++d) sum += number_of(x[d]) * number_of(x[d]);
    const float factor = 1 / std::sqrt(sum / D + eps);
    for (int64_t d = 0; d < D; ++d) store(y + d, number_of(x[d]) * factor * number_of(weight[d]));
  }
}

// Heads x [B, H, D] of one token of each row. The first C channels rotate, in pairs of one in their first half and one
// in the second, by angles whose cosines and sines [C] are `of_row` numbers after those of the row before.
template <class T>
void turn(int64_t B, int64_t H, int D, int C, const T *x, const T *cosine, const T *sine, int64_t of_row, T *y) {
  const int half = C / 2;
  for (int64_t b = 0; b < B; ++b, cosine += of_row, sine += of_row)
    for (int64_t h = 0; h < H; ++h, x += D, y += D) {
      for (int d = 0; d < C; ++d) store(y + d, number_of(x[d]) * number_of(cosine[d]));
      for (int d = 0; d < half; ++d) {
        store(y + d, number_of(y[d]) - number_of(x[d + half]) * number_of(sine[d]));
        store(y + d + half, number_of(y[d + half]) + number_of(x[d]) * number_of(sine[d + half]));
      }
      for (int d = C; d < D; ++d) y[d] = x[d];
    }
}

struct Head {
  const uint8_t *keys;
  const uint8_t *values;
  const uint8_t *visible; // whether an entry is there; or null
  const int32_t *number;  // 0 if it is not; or null
  int64_t count;          // of entries
  int64_t stride;         // bytes from one to the next
};

// Outputs o [G, D] of rotated queries q [G, D], and the logarithms of their mass. D is 0 if it is not known here.
template <int G, int CHANNELS>
void attend(const Head &head, int D, const float *q, float softcap, float *p, float *o, float *mass) {
  if (CHANNELS) D = CHANNELS;
  const int64_t n = head.count;
  for (int64_t j = 0; j < n; ++j) {
    const uint8_t *row = head.keys + j * head.stride;
    const int8_t *code = (const int8_t *)row + SCALE;
    float s[G] = {};
    for (int d = 0; d < D; ++d)
      for (int g = 0; g < G; ++g) s[g] += q[g * D + d] * (float)code[d];
    const float scale = scale_of(row);
    for (int g = 0; g < G; ++g) p[g * n + j] = s[g] * scale;
  }
  float sums[G][CHANNELS ? CHANNELS : WIDEST] = {};
  float total[G] = {};
  for (int g = 0; g < G; ++g) {
    float *of_query = p + g * n;
    if (softcap)
      for (int64_t j = 0; j < n; ++j) of_query[j] = softcap * std::tanh(of_query[j] / softcap);
    float most = -INFINITY;
    for (int64_t j = 0; j < n; ++j) {
      const bool is_hidden = (head.visible && !head.visible[j]) || (head.number && !head.number[j]);
      if (is_hidden) of_query[j] = -INFINITY;
      most = of_query[j] > most ? of_query[j] : most;
    }
    if (most == -INFINITY) most = 0; // nothing is visible
    float sum = 0;
    for (int64_t j = 0; j < n; ++j) {
      const float x = exponential(of_query[j] - most);
      of_query[j] = x;
      sum += x;
    }
    total[g] = sum;
    mass[g] = total[g] ? most + std::log(total[g]) : -INFINITY;
    const float factor = total[g] ? 1 / total[g] : 0;
    for (int64_t j = 0; j < n; ++j) of_query[j] *= factor; // before sums, in which values may be large
  }
  for (int64_t j = 0; j < n; ++j) {
    const uint8_t *row = head.values + j * head.stride;
    const int8_t *code = (const int8_t *)row + SCALE;
    const float scale = scale_of(row);
    for (int g = 0; g < G; ++g) {
      const float weight = p[g * n + j] * scale;
      for (int d = 0; d < D; ++d) sums[g][d] += weight * (float)code[d];
    }
  }
  for (int g = 0; g < G; ++g)
    for (int d = 0; d < D; ++d) o[g * D + d] = total[g] ? sums[g][d] : 0;
}

template <int CHANNELS>
void attend_some(int G, const Head &head, int D, const float *q, float softcap, float *p, float *o, float *mass) {
  static void (*const functions[TOGETHER])(const Head &, int, const float *, float, float *, float *, float *) = {
      attend<1, CHANNELS>, attend<2, CHANNELS>, attend<3, CHANNELS>, attend<4, CHANNELS>};
  functions[G - 1](head, D, q, softcap, p, o, mass);
}

// The same of queries as they are, some at a time; p has room for the scores of these.
template <class T>
void attend_head(const Head &head, int G, int D, const T *q, float scale, float softcap, float *p, T *o, float *mass) {
  float asked[TOGETHER * WIDEST];
  float found[TOGETHER * WIDEST];
  for (int g = 0; g < G; g += TOGETHER) {
    const int together = G - g < TOGETHER ? G - g : TOGETHER;
    for (int i = 0; i < together * D; ++i) asked[i] = number_of(q[g * D + i]) * scale;
    for (int i = 0; i < together; ++i) rotate(asked + i * D, D);
    if (D == 64)
      attend_some<64>(together, head, D, asked, softcap, p, found, mass + g);
    else if (D == 128)
      attend_some<128>(together, head, D, asked, softcap, p, found, mass + g);
    else
      attend_some<0>(together, head, D, asked, softcap, p, found, mass + g);
    for (int i = 0; i < together; ++i) rotate(found + i * D, D);
    for (int i = 0; i < together * D; ++i) store(o + g * D + i, found[i]);
  }
}

int64_t largest(const int64_t *x, int64_t n) { return *std::max_element(x, x + n); }

template <class T>
void attention(int64_t B, int64_t H, int G, int D, const int64_t *first, const int64_t *count,
               const int64_t *first_visible, int64_t stride, const uint8_t *const *held, const uint8_t *visible,
               int64_t visible_stride, const T *q, int64_t q_row, int64_t q_head, float scale, float softcap, T *o,
               float *mass) {
  std::vector<float> p(TOGETHER * largest(count, H));
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h, o += G * D, mass += G) {
      const uint8_t *seen = visible ? visible + b * visible_stride + first_visible[h] : nullptr;
      const Head head = {held[b] + first[h], held[B + b] + first[h], seen, nullptr, count[h], stride};
      attend_head(head, G, D, q + b * q_row + h * q_head, scale, softcap, p.data(), o, mass);
    }
}

// The entries of a head, and the block of c tokens after which it is decided which of them stay.
struct Entries {
  uint8_t *keys;
  uint8_t *values;
  int32_t *number; // of the token, from 1; 0: no token
  float *score;    // what the entries that stay were worth
  int stay;        // entries that stay
  int c;           // entries after these, which are the tokens of the block
};

// The number of empty entries before all others: after few tokens most of those that stay.
int leading_empty(const Entries &held) {
  int found = 0;
  while (found < held.stay && !held.number[found]) ++found;
  return found;
}

// How it is decided.
struct Rule {
  int first;      // first tokens of the text, which always stay
  int window;     // last entries, which always stay
  bool is_change; // change_of_output, not received_attention
  float scale;
  float softcap;
};

// The numbers [count, D] of packed rows, as they were packed.
void unpack(const uint8_t *packed, int count, int D, float *numbers) {
  for (int j = 0; j < count; ++j, packed += SCALE + D, numbers += D) {
    const float scale = scale_of(packed);
    for (int d = 0; d < D; ++d) numbers[d] = scale * (float)(int8_t)packed[SCALE + d];
  }
}

// y [rows, LANES] = a x, of x [columns, LANES] and the numbers a[i * row + j * column].
template <int ROWS> void multiply_some(int columns, const float *a, int row, int column, const float *x, float *y) {
  float sums[ROWS][LANES] = {};
  for (int j = 0; j < columns; ++j, a += column, x += LANES)
    for (int r = 0; r < ROWS; ++r)
      for (int i = 0; i < LANES; ++i) sums[r][i] += a[r * row] * x[i];
  memcpy(y, sums, sizeof(sums));
}

void multiply(int rows, int columns, const float *a, int row, int column, const float *x, float *y) {
  const int TILE = 4; // rows whose sums are in registers
  int i = 0;
  for (; i + TILE <= rows; i += TILE) multiply_some<TILE>(columns, a + i * row, row, column, x, y + i * LANES);
  for (; i < rows; ++i) multiply_some<1>(columns, a + i * row, row, column, x, y + i * LANES);
}

// Adds what attention p [n, LANES] of some queries, columns of q [D, LANES], says of entries, keys and values [n, D].
//
// received_attention: sum_i p_ij.   change_of_output: sum_i w_ij^2 |o_i - v_j|^2,   w_ij = p_ij / (1 - p_ij)
void add_worth(const Rule &rule, int n, int c, int D, const int32_t *number, const float *keys, const float *values,
               int queries, const int *place, const float *q, float *p, float *added) {
  float most[LANES];
  float total[LANES] = {};
  for (int i = 0; i < LANES; ++i) most[i] = -INFINITY;
  multiply(n, D, keys, D, 1, q, p);
  if (rule.softcap)
    for (int i = 0; i < n * LANES; ++i) p[i] = rule.softcap * std::tanh(p[i] / rule.softcap);
  for (int j = 0; j < n; ++j) {
    float *of_entry = p + j * LANES;
    const int back = j - (n - c); // the place in the block
    const int last = back >= 0 || number[j] ? back : c;
    for (int i = 0; i < LANES; ++i) {
      of_entry[i] = last <= place[i] ? of_entry[i] : -INFINITY;
      most[i] = of_entry[i] > most[i] ? of_entry[i] : most[i];
    }
  }
  for (int j = 0; j < n; ++j)
    for (int i = 0; i < LANES; ++i) {
      const float x = exponential(p[j * LANES + i] - most[i]);
      p[j * LANES + i] = x;
      total[i] += x;
    }
  float factor[LANES];
  float highest[LANES] = {};
  int nearest[LANES] = {}; // the entry of which a query sees most
  for (int i = 0; i < LANES; ++i) factor[i] = i < queries ? 1 / total[i] : 0;
  for (int j = 0; j < n; ++j) {
    float sum = 0;
    for (int i = 0; i < LANES; ++i) {
      const float x = p[j * LANES + i] *= factor[i];
      sum += x;
      nearest[i] = x > highest[i] ? j : nearest[i];
      highest[i] = x > highest[i] ? x : highest[i];
    }
    if (!rule.is_change) added[j] += sum;
  }
  if (!rule.is_change) return;
  std::vector<float> o(D * LANES); // [D, LANES]
  std::vector<float> products(n * LANES);
  float size[LANES] = {};
  multiply(D, n, values, 1, D, p, o.data());
  // Where p is nearly one, o is nearly v, and the terms of the square would cancel.
  for (int i = 0; i < queries; ++i) {
    const int j = nearest[i];
    float &x = p[j * LANES + i];
    const float rest = 1 - x < LEAST_REST ? LEAST_REST : 1 - x;
    float square = 0;
    for (int d = 0; d < D; ++d) {
      const float difference = o[d * LANES + i] - values[j * D + d];
      square += difference * difference;
    }
    added[j] += x / rest * (x / rest) * square;
    x = 0;
  }
  multiply(n, D, values, D, 1, o.data(), products.data());
  for (int d = 0; d < D; ++d)
    for (int i = 0; i < LANES; ++i) size[i] += o[d * LANES + i] * o[d * LANES + i];
  for (int j = 0; j < n; ++j, values += D) {
    float square = 0;
    for (int d = 0; d < D; ++d) square += values[d] * values[d];
    float sum = 0;
    for (int i = 0; i < LANES; ++i) {
      const float x = p[j * LANES + i];
      const float rest = 1 - x < LEAST_REST ? LEAST_REST : 1 - x;
      sum += x / rest * (x / rest) * (size[i] - 2 * products[j * LANES + i] + square);
    }
    added[j] += sum;
  }
}

// Keeps the entries of a head that are worth most, in their order, in place.
void keep_best(const Entries &held, const Rule &rule, int D, const float *worth) {
  const int n = held.stay + held.c;
  const int stride = SCALE + D;
  const int older = n - rule.window;
  const int kept = held.stay - rule.window;
  std::vector<float> rank(older);
  std::vector<int> places(older);
  for (int j = 0; j < older; ++j) {
    const int number = held.number[j];
    const bool always_stays = number <= rule.first || worth[j] != worth[j];
    rank[j] = number == 0 ? -1 : always_stays ? INFINITY : worth[j];
    places[j] = j;
  }
  const auto is_better = [&](int a, int b) { return rank[a] > rank[b] || (rank[a] == rank[b] && a < b); };
  std::nth_element(places.begin(), places.begin() + kept, places.end(), is_better);
  std::sort(places.begin(), places.begin() + kept);
  for (int i = 0; i < held.stay; ++i) {
    const int j = i < kept ? places[i] : older + i - kept;
    memmove(held.keys + i * stride, held.keys + j * stride, stride);
    memmove(held.values + i * stride, held.values + j * stride, stride);
    held.number[i] = held.number[j];
    held.score[i] = worth[j];
  }
  memset(held.keys + held.stay * stride, 0, held.c * stride);
  memset(held.values + held.stay * stride, 0, held.c * stride);
  memset(held.number + held.stay, 0, held.c * sizeof(int32_t));
}

template <class T> void end_block(const Entries &held, const Rule &rule, int G, int D, T *queries) {
  const int n = held.stay + held.c;
  const int empty = leading_empty(held);
  const int there = n - empty;
  std::vector<float> keys(there * D);
  std::vector<float> values(there * D);
  unpack(held.keys + empty * (SCALE + D), there, D, keys.data());
  unpack(held.values + empty * (SCALE + D), there, D, values.data());
  std::vector<float> p(there * LANES);
  std::vector<float> q(D * LANES);
  std::vector<float> worth(n);
  for (int start = 0; start < G * held.c; start += LANES) {
    const int some = G * held.c - start < LANES ? G * held.c - start : LANES;
    int place[LANES] = {};
    std::fill(q.begin(), q.end(), 0);
    for (int i = 0; i < some; ++i) {
      float row[WIDEST];
      for (int d = 0; d < D; ++d) row[d] = number_of(queries[(start + i) * D + d]) * rule.scale;
      rotate(row, D);
      for (int d = 0; d < D; ++d) q[d * LANES + i] = row[d];
      place[i] = (start + i) % held.c;
    }
    add_worth(rule, there, held.c, D, held.number + empty, keys.data(), values.data(), some, place, q.data(), p.data(),
              worth.data() + empty);
  }
  for (int j = 0; j < n; ++j) {
    if (worth[j] < 0) worth[j] = 0;
    if (j < held.stay) worth[j] += DECAY * held.score[j];
  }
  keep_best(held, rule, D, worth.data());
  memset(queries, 0, G * held.c * D * sizeof(T));
}

// One token of each sequence is written among the entries of each head, read, and may end a block. `rows` are where the
// keys of each sequence begin, then the values, and so on.
template <class T>
void read_token(int64_t B, int64_t H, int G, int D, int c, const Rule &rule, const int64_t *sizes, void *const *rows,
                const int64_t *positions, const T *q, int64_t q_row, int64_t q_head, const T *k, int64_t k_row,
                int64_t k_head, const T *v, int64_t v_row, int64_t v_head, T *o) {
  const int stride = SCALE + D;
  std::vector<float> p(TOGETHER * largest(sizes, H));
  std::vector<float> mass(G);
  for (int64_t b = 0; b < B; ++b) {
    Entries held;
    held.keys = (uint8_t *)rows[b];
    held.values = (uint8_t *)rows[B + b];
    held.number = (int32_t *)rows[2 * B + b];
    held.score = (float *)rows[3 * B + b];
    held.c = c;
    T *asked = (T *)rows[4 * B + b];
    const int place = positions[b] % c;
    for (int64_t h = 0; h < H; ++h) {
      held.stay = sizes[h] - c;
      const int at = held.stay + place;
      const T *of_head = q + b * q_row + h * q_head;
      pack(1, D, k + b * k_row + h * k_head, held.keys + at * stride);
      pack(1, D, v + b * v_row + h * v_head, held.values + at * stride);
      held.number[at] = positions[b] + 1;
      for (int g = 0; g < G; ++g) memcpy(asked + (g * c + place) * D, of_head + g * D, D * sizeof(T));
      const int empty = leading_empty(held);
      const int64_t count = at + 1 - empty;
      const int before = empty * stride;
      const Head head = {held.keys + before, held.values + before, nullptr, held.number + empty, count, stride};
      attend_head(head, G, D, of_head, rule.scale, rule.softcap, p.data(), o, mass.data());
      if (place == c - 1) end_block(held, rule, G, D, asked);
      held.keys += sizes[h] * stride;
      held.values += sizes[h] * stride;
      held.number += sizes[h];
      held.score += held.stay;
      asked += G * c * D;
      o += G * D;
    }
  }
}

} // namespace

#define ATTENTION(NAME, T)                                                                                             \
  extern "C" void NAME(int64_t B, int64_t H, int G, int D, const int64_t *first, const int64_t *count,                 \
                       const int64_t *first_visible, int64_t stride, const uint8_t *const *held,                       \
                       const uint8_t *visible, int64_t visible_stride, const T *q, int64_t q_row, int64_t q_head,      \
                       float scale, float softcap, T *o, float *mass) {                                                \
    attention(B, H, G, D, first, count, first_visible, stride, held, visible, visible_stride, q, q_row, q_head, scale, \
              softcap, o, mass);                                                                                       \
  }

ATTENTION(attend_float32, float)
ATTENTION(attend_bfloat16, BFloat16)

extern "C" void pack_float32(int64_t rows, int D, const float *x, uint8_t *packed) { pack(rows, D, x, packed); }
extern "C" void pack_bfloat16(int64_t rows, int D, const BFloat16 *x, uint8_t *packed) { pack(rows, D, x, packed); }

#define READ_TOKEN(NAME, T)                                                                                            \
  extern "C" void NAME(int64_t B, int64_t H, int G, int D, int c, int first, int window, int is_change, float scale,   \
                       float softcap, const int64_t *sizes, void *const *rows, const int64_t *positions, const T *q,   \
                       int64_t q_row, int64_t q_head, const T *k, int64_t k_row, int64_t k_head, const T *v,           \
                       int64_t v_row, int64_t v_head, T *o) {                                                          \
    const Rule rule = {first, window, is_change != 0, scale, softcap};                                                 \
    read_token(B, H, G, D, c, rule, sizes, rows, positions, q, q_row, q_head, k, k_row, k_head, v, v_row, v_head, o);  \
  }

READ_TOKEN(read_token_float32, float)
READ_TOKEN(read_token_bfloat16, BFloat16)

#define OF_ONE_TOKEN(TYPE, T)                                                                                          \
  extern "C" void rms_norm_##TYPE(int64_t rows, int64_t D, const T *x, const T *weight, float eps, T *y) {             \
    rms_norm(rows, D, x, weight, eps, y);                                                                              \
  }                                                                                                                    \
  extern "C" void turn_##TYPE(int64_t B, int64_t H, int D, int C, const T *x, const T *cosine, const T *sine,          \
                              int64_t of_row, T *y) {                                                                  \
    turn(B, H, D, C, x, cosine, sine, of_row, y);                                                                      \
  }

OF_ONE_TOKEN(float32, float)
OF_ONE_TOKEN(bfloat16, BFloat16)
