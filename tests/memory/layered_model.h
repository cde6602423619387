// The parameters of a GPT of 61.7 million elements, in layers.
#ifndef SHARDD_TESTS_MEMORY_LAYERED_MODEL_H_
#define SHARDD_TESTS_MEMORY_LAYERED_MODEL_H_

#include <cstddef>
#include <vector>

#include "client/client.h"

namespace shardd::test {

struct LayeredModel {
  std::vector<ParameterSpec> parameters;    // in registration order
  std::vector<std::vector<size_t>> layers;  // parameters of each, in order of use
};

LayeredModel MakeLayeredModel();

}  // namespace shardd::test

#endif  // SHARDD_TESTS_MEMORY_LAYERED_MODEL_H_
