#include "client/python/native/python_status.h"

#include <pybind11/pybind11.h>

#include <optional>
#include <string>

#include "client/client.h"

namespace shardd::python {

namespace py = pybind11;

void Raise(const absl::Status& status) {
  if (status.ok()) return;
  const std::optional<Regrouped> regrouped = GetRegrouped(status);
  const py::object next_step = regrouped ? py::object(py::int_(regrouped->next_step)) : py::none();
  const py::object blob = regrouped ? py::object(py::bytes(regrouped->blob)) : py::none();
  const std::string message(status.message());
  const py::object error =
      py::module_::import("shardd.errors")
          .attr("_from_status")(absl::StatusCodeToString(status.code()), message, next_step, blob);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

}  // namespace shardd::python
