// shardd._native: what the package's Python code needs of the C++ client.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "client/client.h"
#include "client/python/native/session_binding.h"
#include "proto/contract/version.h"

namespace py = pybind11;

namespace shardd::python {

namespace {

void BindResults(py::module_* module) {
  py::class_<Decision>(*module, "Decision", "The decision on one step.")
      .def_readonly("step", &Decision::step)
      .def_readonly("applied", &Decision::applied)
      .def_property_readonly("skipped",
                             [](const Decision& d) { return d.result == StepResult::kSkipped; })
      .def_readonly("reason", &Decision::reason)
      .def_readonly("loss", &Decision::loss)
      .def_readonly("grad_norm", &Decision::grad_norm)
      .def_readonly("loss_scale", &Decision::loss_scale);
  py::class_<StepRecord>(*module, "StepRecord", "What the daemon keeps of a step.")
      .def_readonly("step", &StepRecord::step)
      .def_readonly("applied", &StepRecord::applied)
      .def_readonly("generation", &StepRecord::generation)
      .def_property_readonly("skipped",
                             [](const StepRecord& r) { return r.result == StepResult::kSkipped; })
      .def_readonly("reason", &StepRecord::reason)
      .def_readonly("loss", &StepRecord::loss)
      .def_readonly("grad_norm", &StepRecord::grad_norm)
      .def_readonly("loss_scale", &StepRecord::loss_scale)
      .def_readonly("lr", &StepRecord::lr)
      .def_readonly("tokens", &StepRecord::tokens);
}

void BindSession(py::module_* module) {
  using S = SessionBinding;
  py::class_<S>(*module, "Session")
      .def(py::init<const py::dict&, const std::string&, const py::list&, const py::list&>())
      .def_property_readonly("rank", [](const S& s) { return s.session().rank(); })
      .def_property_readonly("world_size", [](const S& s) { return s.session().world_size(); })
      .def_property_readonly("slots",
                             [](const S& s) {
                               const Slots slots = s.session().slots();
                               return py::make_tuple(slots.lo, slots.hi);
                             })
      .def_property_readonly("next_step", [](const S& s) { return s.session().next_step(); })
      .def_property_readonly("blob", [](const S& s) { return py::bytes(s.session().blob()); })
      .def_property_readonly("loss_scale", [](const S& s) { return s.session().loss_scale(); })
      .def_property_readonly("generation", [](const S& s) { return s.session().generation(); })
      .def_property_readonly("initialising", [](const S& s) { return s.session().initialising(); })
      .def_property_readonly("done", &S::done)
      .def_property_readonly("failed", &S::failed)
      .def_property_readonly("ending", &S::ending)
      .def("take_log", &S::TakeLog)
      .def("upload", &S::Upload)
      .def("upload_moment", &S::UploadMoment)
      .def("upload_frozen", &S::UploadFrozen)
      .def("finish_upload", &S::FinishUpload)
      .def("send_gradient", &S::SendGradient)
      .def("wait", &S::Wait)
      .def("check_gradients", &S::CheckGradients)
      .def("rejoin", &S::Rejoin)
      .def("end_step", &S::EndStep)
      .def("finish_step", &S::FinishStep)
      .def("fetch", &S::Fetch)
      .def("start_fetch", &S::StartFetch)
      .def("weights", &S::Weights)
      .def("gather", &S::Gather)
      .def("release", &S::Release)
      .def("read_state", &S::ReadState)
      .def("parameter_applied", &S::ParameterApplied)
      .def("step_records", &S::StepRecords)
      .def("save_checkpoint", &S::SaveCheckpoint)
      .def("close", &S::Close)
      .def("delete_job", &S::DeleteJob);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.attr("version") = contract::kVersion;
  BindResults(&module);
  BindSession(&module);
}

}  // namespace shardd::python
