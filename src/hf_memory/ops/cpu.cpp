// Rows in 8 or 4 bits on a CPU: packing them, and attention of one token to them, see bits.py and attention_in_bits.
// Reading tokens among kept ones, which are stored in few bits or as numbers, see kv_eviction. And the norms and
// rotations of one token, which are several operations of PyTorch.
//
// In 8 bits a packed row is its scale in bfloat16 and then a code for each channel. In 4 bits it is the scale of each
// group of channels, the least number of each, and a byte with the codes of two channels, the first of which is in the
// first half of the row. Codes become numbers in registers, so that little is written but the scores of a head.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

const int SCALE = 2;    // bytes of a scale
const int GROUP = 32;   // channels that share a scale in 4 bits
const int MOST = 127;   // the largest code in 8 bits
const int LARGEST = 15; // the same in 4
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

// Rows in more bits are numbers as they are: float, or BFloat16.
bool is_packed(int bits) { return bits <= 8; }

int row_bytes(int bits, int D) {
  if (!is_packed(bits)) return bits / 8 * D;
  return bits == 8 ? SCALE + D : 2 * SCALE * (D / GROUP) + D / 2;
}

// The channels of a row in 4 bits. Loops of as many steps as a register has numbers become a few instructions.
inline void numbers_of_groups(const uint8_t *row, int D, float *x) {
  const int STEPS = GROUP / 2;
  const int half = D / 2;
  const uint8_t *least = row + SCALE * (D / GROUP);
  const uint8_t *codes = least + SCALE * (D / GROUP);
  for (int start = 0; start < half; start += STEPS) {
    const int first = start / GROUP * SCALE;
    const int second = (half + start) / GROUP * SCALE;
    const float scales[] = {scale_of(row + first), scale_of(row + second)};
    const float at_least[] = {scale_of(least + first), scale_of(least + second)};
    for (int i = start; i < start + STEPS; ++i) x[i] = at_least[0] + scales[0] * (float)(codes[i] & 15);
    for (int i = start; i < start + STEPS; ++i) x[half + i] = at_least[1] + scales[1] * (float)(codes[i] >> 4);
  }
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

void pack_row(int D, const double *x, uint8_t *packed) {
  double largest = 0;
  for (int i = 0; i < D; ++i) {
    const double size = std::fabs(x[i]);
    largest = size > largest || size != size ? size : largest;
  }
  float scale = (float)(largest / MOST);
  const BFloat16 kept = rounded(scale < SMALLEST ? SMALLEST : scale);
  memcpy(packed, &kept, SCALE);
  scale = number_of(kept);
  const bool is_finite = std::isfinite(scale);
  for (int i = 0; i < D; ++i) packed[SCALE + i] = is_finite ? (uint8_t)(int8_t)std::nearbyint(x[i] / scale) : 0;
}

void pack_groups(int D, const double *x, uint8_t *packed) {
  const int groups = D / GROUP;
  const int half = D / 2;
  uint8_t code[WIDEST];
  for (int group = 0; group < groups; ++group, x += GROUP) {
    double least = x[0];
    double greatest = x[0];
    for (int i = 1; i < GROUP; ++i) {
      least = x[i] < least || x[i] != x[i] ? x[i] : least;
      greatest = x[i] > greatest || x[i] != x[i] ? x[i] : greatest;
    }
    const BFloat16 first = rounded((float)least);
    least = number_of(first);
    const float scale = (float)((greatest - least) / LARGEST);
    const BFloat16 kept = rounded(scale < SMALLEST ? SMALLEST : scale);
    memcpy(packed + SCALE * group, &kept, SCALE);
    memcpy(packed + SCALE * (groups + group), &first, SCALE);
    const double step = number_of(kept);
    for (int i = 0; i < GROUP; ++i) {
      const double found = std::nearbyint((x[i] - least) / step);
      code[group * GROUP + i] = found > LARGEST ? LARGEST : found > 0 ? found : 0;
    }
  }
  for (int i = 0; i < half; ++i) packed[2 * SCALE * groups + i] = code[i] | code[half + i] << 4;
}

template <class T> void pack(int64_t rows, int D, int bits, const T *x, uint8_t *packed) {
  double rotated[WIDEST];
  for (int64_t row = 0; row < rows; ++row, x += D, packed += row_bytes(bits, D)) {
    for (int i = 0; i < D; ++i) rotated[i] = number_of(x[i]);
    rotate(rotated, D);
    if (bits == 8)
      pack_row(D, rotated, packed);
    else
      pack_groups(D, rotated, packed);
  }
}

// One row as it is stored.
template <class T> void write_row(int D, int bits, const T *x, uint8_t *stored) {
  if (is_packed(bits))
    pack(1, D, bits, x, stored);
  else
    memcpy(stored, x, D * sizeof(T));
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

// Keys or values of a head.
struct Packed {
  const uint8_t *rows;
  int64_t stride; // bytes from one to the next
  int bits;
};

struct Head {
  Packed keys;
  Packed values;
  const uint8_t *visible; // whether an entry is there; or null
  const int32_t *number;  // 0 if it is not; or null
  int64_t count;          // of entries
};

// The channels of a row, and the factor of all of them.
template <int BITS> inline float read_row(const uint8_t *row, int D, float *x) {
  if (BITS == 8)
    for (int d = 0; d < D; ++d) x[d] = (float)(int8_t)row[SCALE + d];
  else if (BITS == 4)
    numbers_of_groups(row, D, x);
  else if (BITS == 16)
    for (int d = 0; d < D; ++d) x[d] = number_of(((const BFloat16 *)row)[d]);
  else
    memcpy(x, row, D * sizeof(float));
  return BITS == 8 ? scale_of(row) : 1;
}

// Calls a function for a number of bits that it knows when it is compiled.
template <class F> void with_bits(int bits, const F &function) {
  if (bits == 8) function(std::integral_constant<int, 8>());
  if (bits == 4) function(std::integral_constant<int, 4>());
  if (bits == 16) function(std::integral_constant<int, 16>());
  if (bits == 32) function(std::integral_constant<int, 32>());
}

// Products p [G, n] of queries q [G, D] with keys. D is 0 if it is not known here.
template <int G, int CHANNELS, int BITS> void products(const Packed &keys, int64_t n, int D, const float *q, float *p) {
  if (CHANNELS) D = CHANNELS;
  const uint8_t *row = keys.rows;
  for (int64_t j = 0; j < n; ++j, row += keys.stride) {
    float x[CHANNELS ? CHANNELS : WIDEST];
    const float scale = read_row<BITS>(row, D, x);
    float s[G] = {};
    for (int d = 0; d < D; ++d)
      for (int g = 0; g < G; ++g) s[g] += q[g * D + d] * x[d];
    for (int g = 0; g < G; ++g) p[g * n + j] = s[g] * scale;
  }
}

// Sums o [G, D] of values with weights p [G, n].
template <int G, int CHANNELS, int BITS>
void weighted_sums(const Packed &values, int64_t n, int D, const float *p, float *o) {
  if (CHANNELS) D = CHANNELS;
  float sums[G][CHANNELS ? CHANNELS : WIDEST] = {};
  const uint8_t *row = values.rows;
  for (int64_t j = 0; j < n; ++j, row += values.stride) {
    float x[CHANNELS ? CHANNELS : WIDEST];
    const float scale = read_row<BITS>(row, D, x);
    for (int g = 0; g < G; ++g) {
      const float weight = p[g * n + j] * scale;
      for (int d = 0; d < D; ++d) sums[g][d] += weight * x[d];
    }
  }
  for (int g = 0; g < G; ++g)
    for (int d = 0; d < D; ++d) o[g * D + d] = sums[g][d];
}

// The softmax of a query's products p [n], in their place, and the logarithm of its mass.
float softmax(const Head &head, float softcap, float *p) {
  const int64_t n = head.count;
  if (softcap)
    for (int64_t j = 0; j < n; ++j) p[j] = softcap * std::tanh(p[j] / softcap);
  float most = -INFINITY;
  for (int64_t j = 0; j < n; ++j) {
    const bool is_hidden = (head.visible && !head.visible[j]) || (head.number && !head.number[j]);
    if (is_hidden) p[j] = -INFINITY;
    most = p[j] > most ? p[j] : most;
  }
  if (most == -INFINITY) most = 0; // nothing is visible
  float total = 0;
  for (int64_t j = 0; j < n; ++j) {
    p[j] = exponential(p[j] - most);
    total += p[j];
  }
  const float factor = total ? 1 / total : 0;
  for (int64_t j = 0; j < n; ++j) p[j] *= factor; // before sums, in which values may be large
  return total ? most + std::log(total) : -INFINITY;
}

// Outputs o [G, D] of rotated queries q [G, D], and the logarithms of their mass; p has room for their scores.
template <int G, int CHANNELS>
void attend(const Head &head, int D, const float *q, float softcap, float *p, float *o, float *mass) {
  const int64_t n = head.count;
  with_bits(head.keys.bits, [&](auto bits) { products<G, CHANNELS, bits>(head.keys, n, D, q, p); });
  for (int g = 0; g < G; ++g) mass[g] = softmax(head, softcap, p + g * n);
  with_bits(head.values.bits, [&](auto bits) { weighted_sums<G, CHANNELS, bits>(head.values, n, D, p, o); });
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
    for (int i = 0; i < together && is_packed(head.keys.bits); ++i) rotate(asked + i * D, D);
    if (D == 64)
      attend_some<64>(together, head, D, asked, softcap, p, found, mass + g);
    else if (D == 128)
      attend_some<128>(together, head, D, asked, softcap, p, found, mass + g);
    else
      attend_some<0>(together, head, D, asked, softcap, p, found, mass + g);
    for (int i = 0; i < together && is_packed(head.values.bits); ++i) rotate(found + i * D, D);
    for (int i = 0; i < together * D; ++i) store(o + g * D + i, found[i]);
  }
}

// Where keys or values of each head begin in a row, in bytes, and how they are stored.
struct Places {
  const int64_t *first;
  int64_t stride;
  int bits;

  Packed of_head(const uint8_t *row, int64_t h) const { return {row + first[h], stride, bits}; }
};

int64_t largest(const int64_t *x, int64_t n) { return *std::max_element(x, x + n); }

template <class T>
void attention(int64_t B, int64_t H, int G, int D, const Places &keys, const Places &values, const int64_t *count,
               const int64_t *first_visible, const uint8_t *const *held, const uint8_t *visible,
               int64_t visible_stride, const T *q, int64_t q_row, int64_t q_head, float scale, float softcap, T *o,
               float *mass) {
  std::vector<float> p(TOGETHER * largest(count, H));
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h, o += G * D, mass += G) {
      const uint8_t *seen = visible ? visible + b * visible_stride + first_visible[h] : nullptr;
      const Head head = {keys.of_head(held[b], h), values.of_head(held[B + b], h), seen, nullptr, count[h]};
      attend_head(head, G, D, q + b * q_row + h * q_head, scale, softcap, p.data(), o, mass);
    }
}

// The entries of a head, and the block of c tokens after which it is decided which of them stay.
struct Entries {
  uint8_t *keys;
  uint8_t *values;
  int key_bits;
  int value_bits;
  int key_bytes; // of a row
  int value_bytes;
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

// The numbers [count, D] of rows, as they are stored.
void unpack(const uint8_t *stored, int bits, int count, int D, float *numbers) {
  with_bits(bits, [&](auto of_row) {
    for (int j = 0; j < count; ++j, stored += row_bytes(bits, D), numbers += D) {
      const float scale = read_row<of_row>(stored, D, numbers);
      for (int d = 0; d < D; ++d) numbers[d] *= scale;
    }
  });
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

// Attention p [n, LANES] of some queries, columns of q [D, LANES], to the keys [n, D] of entries. The last c entries are
// a block, in which a query sees those up to its place; of those before it, it sees all that are there.
void attention_of(const Rule &rule, int n, int c, int D, const int32_t *number, const float *keys, int queries,
                  const int *place, const float *q, float *p) {
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
  for (int i = 0; i < LANES; ++i) factor[i] = i < queries ? 1 / total[i] : 0;
  for (int j = 0; j < n; ++j)
    for (int i = 0; i < LANES; ++i) p[j * LANES + i] *= factor[i];
}

// Adds sum_i p_ij, for received_attention.
void add_attention(int n, const float *p, float *added) {
  for (int j = 0; j < n; ++j) {
    float sum = 0;
    for (int i = 0; i < LANES; ++i) sum += p[j * LANES + i];
    added[j] += sum;
  }
}

// Adds sum_i w_ij^2 |o_i - v_j|^2, w_ij = p_ij / (1 - p_ij), for change_of_output; o are the outputs [D, LANES] of the
// queries, of values [n, D]. It changes p.
void add_change(int n, int D, const float *values, int queries, float *p, const float *o, float *added) {
  float highest[LANES] = {};
  int nearest[LANES] = {}; // the entry of which a query sees most
  for (int j = 0; j < n; ++j)
    for (int i = 0; i < LANES; ++i) {
      const float x = p[j * LANES + i];
      nearest[i] = x > highest[i] ? j : nearest[i];
      highest[i] = x > highest[i] ? x : highest[i];
    }
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
  std::vector<float> products(n * LANES);
  float size[LANES] = {};
  multiply(n, D, values, D, 1, o, products.data());
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
void keep_best(const Entries &held, const Rule &rule, const float *worth) {
  const int n = held.stay + held.c;
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
    memmove(held.keys + i * held.key_bytes, held.keys + j * held.key_bytes, held.key_bytes);
    memmove(held.values + i * held.value_bytes, held.values + j * held.value_bytes, held.value_bytes);
    held.number[i] = held.number[j];
    held.score[i] = worth[j];
  }
  memset(held.keys + held.stay * held.key_bytes, 0, held.c * held.key_bytes);
  memset(held.values + held.stay * held.value_bytes, 0, held.c * held.value_bytes);
  memset(held.number + held.stay, 0, held.c * sizeof(int32_t));
}

// Queries [G, c, D] of a block, of which the tokens at places before `end` are there. Outputs are those of places from
// `start` on, o + g D for each query of the first of them, and so on `o_token` later; none if o is null. A block that
// ends leaves the entries that are worth most.
template <class T>
void read_block(const Entries &held, const Rule &rule, int G, int D, int start, int end, T *queries, T *o,
                int64_t o_token) {
  const bool ends = end == held.c;
  const bool needs_outputs = o || rule.is_change;
  const int empty = leading_empty(held);
  const int there = held.stay + end - empty;
  std::vector<float> keys(there * D);
  std::vector<float> values(there * D);
  unpack(held.keys + empty * held.key_bytes, held.key_bits, there, D, keys.data());
  unpack(held.values + empty * held.value_bytes, held.value_bits, there, D, values.data());
  std::vector<float> p(there * LANES);
  std::vector<float> q(D * LANES);
  std::vector<float> outputs(D * LANES);
  std::vector<float> worth(held.stay + held.c);
  const int first = ends ? 0 : start; // what tokens are worth depends on all queries
  const int tokens = end - first;
  float row[WIDEST];
  for (int done = 0; done < G * tokens; done += LANES) {
    const int some = G * tokens - done < LANES ? G * tokens - done : LANES;
    int place[LANES] = {};
    std::fill(q.begin(), q.end(), 0);
    for (int i = 0; i < some; ++i) {
      const int g = (done + i) / tokens;
      place[i] = first + (done + i) % tokens;
      for (int d = 0; d < D; ++d) row[d] = number_of(queries[(g * held.c + place[i]) * D + d]) * rule.scale;
      if (is_packed(held.key_bits)) rotate(row, D);
      for (int d = 0; d < D; ++d) q[d * LANES + i] = row[d];
    }
    attention_of(rule, there, end, D, held.number + empty, keys.data(), some, place, q.data(), p.data());
    if (needs_outputs) multiply(D, there, values.data(), 1, D, p.data(), outputs.data());
    for (int i = 0; i < some && o; ++i) {
      if (place[i] < start) continue;
      for (int d = 0; d < D; ++d) row[d] = outputs[d * LANES + i];
      if (is_packed(held.value_bits)) rotate(row, D);
      T *found = o + (place[i] - start) * o_token + (done + i) / tokens * D;
      for (int d = 0; d < D; ++d) store(found + d, row[d]);
    }
    if (!ends) continue;
    float *added = worth.data() + empty;
    if (rule.is_change)
      add_change(there, D, values.data(), some, p.data(), outputs.data(), added);
    else
      add_attention(there, p.data(), added);
  }
  if (!ends) return;
  for (float &x : worth) x = x < 0 ? 0 : x;
  for (int j = 0; j < held.stay; ++j) worth[j] += DECAY * held.score[j];
  keep_best(held, rule, worth.data());
  memset(queries, 0, G * held.c * D * sizeof(T));
}

// Vectors of T in which each token of each row has one for each head.
template <class T> struct Rows {
  T *x;
  int64_t row; // from one to the next
  int64_t token;
  int64_t head;

  T *at(int64_t b, int64_t h) const { return x + b * row + h * head; }
};

// Some new tokens of a head, of which `before` were read before.
template <class T>
void read_head(const Entries &held, const Rule &rule, int G, int D, int64_t before, int64_t count, T *queries,
               const T *q, int64_t q_token, const T *k, int64_t k_token, const T *v, int64_t v_token, T *o,
               int64_t o_token) {
  const int c = held.c;
  for (int64_t read = 0; read < count;) {
    const int start = (before + read) % c;
    const int end = count - read < c - start ? start + count - read : c;
    for (int place = start; place < end; ++place, ++read, q += q_token, k += k_token, v += v_token) {
      const int at = held.stay + place;
      write_row(D, held.key_bits, k, held.keys + at * held.key_bytes);
      write_row(D, held.value_bits, v, held.values + at * held.value_bytes);
      held.number[at] = before + read + 1;
      for (int g = 0; g < G; ++g) memcpy(queries + (g * c + place) * D, q + g * D, D * sizeof(T));
    }
    if (end - start > 1) {
      read_block(held, rule, G, D, start, end, queries, o, o_token);
    } else {
      const int empty = leading_empty(held);
      const int64_t seen = held.stay + end - empty;
      const Packed keys = {held.keys + empty * held.key_bytes, held.key_bytes, held.key_bits};
      const Packed values = {held.values + empty * held.value_bytes, held.value_bytes, held.value_bits};
      const Head head = {keys, values, nullptr, held.number + empty, seen};
      std::vector<float> p(TOGETHER * seen);
      std::vector<float> mass(G);
      attend_head(head, G, D, q - q_token, rule.scale, rule.softcap, p.data(), o, mass.data());
      if (end == c) read_block<T>(held, rule, G, D, c, c, queries, nullptr, 0);
    }
    o += (end - start) * o_token;
  }
}

// Calls a function for 0 to `count` - 1, in any order, in some threads.
template <class F> void in_threads(int threads, int64_t count, const F &function) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i = next++; i < count; i = next++) function(i);
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads && i < count; ++i) others.emplace_back(work);
  work();
  for (std::thread &other : others) other.join();
}

// New tokens of each sequence are written among the entries of each head, read, and end blocks. `rows` are where the
// keys of each sequence begin, then the values, and so on.
template <class T>
void read_tokens(int64_t B, int64_t H, int G, int D, int c, int key_bits, int value_bits, const Rule &rule, int threads,
                 const int64_t *sizes, void *const *rows, const int64_t *before, const int64_t *counts,
                 const Rows<const T> &q, const Rows<const T> &k, const Rows<const T> &v, const Rows<T> &o) {
  std::vector<int64_t> entries(H); // before those of each head
  for (int64_t h = 1; h < H; ++h) entries[h] = entries[h - 1] + sizes[h - 1];
  in_threads(threads, B * H, [&](int64_t i) {
    const int64_t b = i / H;
    const int64_t h = i % H;
    Entries held;
    held.key_bits = key_bits;
    held.value_bits = value_bits;
    held.key_bytes = row_bytes(key_bits, D);
    held.value_bytes = row_bytes(value_bits, D);
    held.keys = (uint8_t *)rows[b] + entries[h] * held.key_bytes;
    held.values = (uint8_t *)rows[B + b] + entries[h] * held.value_bytes;
    held.number = (int32_t *)rows[2 * B + b] + entries[h];
    held.score = (float *)rows[3 * B + b] + entries[h] - h * c;
    held.stay = sizes[h] - c;
    held.c = c;
    T *queries = (T *)rows[4 * B + b] + h * G * c * D;
    read_head(held, rule, G, D, before[b], counts[b], queries, q.at(b, h), q.token, k.at(b, h), k.token, v.at(b, h),
              v.token, o.at(b, h), o.token);
  });
}

} // namespace

#define ATTENTION(NAME, T)                                                                                             \
  extern "C" void NAME(int64_t B, int64_t H, int G, int D, const int64_t *first_key, int64_t key_stride, int key_bits, \
                       const int64_t *first_value, int64_t value_stride, int value_bits, const int64_t *count,         \
                       const int64_t *first_visible, const uint8_t *const *held, const uint8_t *visible,               \
                       int64_t visible_stride, const T *q, int64_t q_row, int64_t q_head, float scale, float softcap,  \
                       T *o, float *mass) {                                                                            \
    attention(B, H, G, D, {first_key, key_stride, key_bits}, {first_value, value_stride, value_bits}, count,           \
              first_visible, held, visible, visible_stride, q, q_row, q_head, scale, softcap, o, mass);                \
  }

ATTENTION(attend_float32, float)
ATTENTION(attend_bfloat16, BFloat16)

#define PACK(NAME, T)                                                                                                  \
  extern "C" void NAME(int64_t rows, int D, int bits, const T *x, uint8_t *packed) { pack(rows, D, bits, x, packed); }

PACK(pack_float32, float)
PACK(pack_bfloat16, BFloat16)

#define READ_TOKENS(NAME, T)                                                                                           \
  extern "C" void NAME(int64_t B, int64_t H, int G, int D, int c, int key_bits, int value_bits, int first, int window, \
                       int is_change, int threads, float scale, float softcap, const int64_t *sizes,                   \
                       void *const *rows, const int64_t *before,                                                       \
                       const int64_t *counts, const T *q, int64_t q_row, int64_t q_token, int64_t q_head, const T *k,  \
                       int64_t k_row, int64_t k_token, int64_t k_head, const T *v, int64_t v_row, int64_t v_token,     \
                       int64_t v_head, T *o, int64_t o_row, int64_t o_token, int64_t o_head) {                         \
    const Rule rule = {first, window, is_change != 0, scale, softcap};                                                 \
    read_tokens<T>(B, H, G, D, c, key_bits, value_bits, rule, threads, sizes, rows, before, counts,                    \
                   {q, q_row, q_token, q_head}, {k, k_row, k_token, k_head}, {v, v_row, v_token, v_head},              \
                   {o, o_row, o_token, o_head});                                                                       \
  }

READ_TOKENS(read_tokens_float32, float)
READ_TOKENS(read_tokens_bfloat16, BFloat16)

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
