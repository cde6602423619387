// absl::Status as Python exceptions of shardd.errors.
#ifndef SHARDD_CLIENT_PYTHON_NATIVE_PYTHON_STATUS_H_
#define SHARDD_CLIENT_PYTHON_NATIVE_PYTHON_STATUS_H_

#include "absl/status/status.h"

namespace shardd::python {

// Raises (as pybind11::error_already_set) unless the status is OK. With Python's lock held.
void Raise(const absl::Status& status);

}  // namespace shardd::python

#endif  // SHARDD_CLIENT_PYTHON_NATIVE_PYTHON_STATUS_H_
