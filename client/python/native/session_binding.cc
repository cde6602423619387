#include "client/python/native/session_binding.h"

#include <cstring>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/python/native/python_status.h"

namespace shardd::python {

namespace py = pybind11;

namespace {

// How often a wait looks for signals, and for lines to show.
constexpr absl::Duration kLook = absl::Milliseconds(50);

SessionOptions ReadOptions(const py::dict& dict) {
  SessionOptions options;
  options.address = dict["address"].cast<std::string>();
  options.rank = dict["rank"].cast<uint32_t>();
  options.world_size = dict["world_size"].cast<uint32_t>();
  options.restarted = dict["restarted"].cast<bool>();
  options.daemon_binary = dict["daemon_binary"].cast<std::string>();
  options.connect_timeout = absl::Seconds(dict["connect_seconds"].cast<double>());
  options.reconnect_timeout = absl::Seconds(dict["reconnect_seconds"].cast<double>());
  const std::string resume = dict["resume"].cast<std::string>();
  options.resume = resume == "never"  ? Resume::kNever
                   : resume == "must" ? Resume::kMust
                                      : Resume::kAuto;
  return options;
}

std::vector<ParameterSpec> ReadParameters(const py::list& list) {
  std::vector<ParameterSpec> specs;
  for (const py::handle& item : list) {
    const auto tuple = py::cast<py::tuple>(item);
    ParameterSpec& spec = specs.emplace_back();
    spec.name = tuple[0].cast<std::string>();
    for (const py::handle& extent : tuple[1]) spec.shape.push_back(extent.cast<int64_t>());
    spec.group = tuple[2].cast<uint32_t>();
    for (const py::handle& alias : tuple[3]) spec.aliases.push_back(alias.cast<std::string>());
  }
  return specs;
}

std::vector<FrozenSpec> ReadFrozen(const py::list& list) {
  std::vector<FrozenSpec> specs;
  for (const py::handle& item : list) {
    const auto tuple = py::cast<py::tuple>(item);
    FrozenSpec& spec = specs.emplace_back();
    spec.name = tuple[0].cast<std::string>();
    for (const py::handle& extent : tuple[1]) spec.shape.push_back(extent.cast<int64_t>());
    spec.dtype = static_cast<DType>(tuple[2].cast<int>());
    for (const py::handle& alias : tuple[3]) spec.aliases.push_back(alias.cast<std::string>());
  }
  return specs;
}

std::vector<Memory> ReadMemory(const py::list& list) {
  std::vector<Memory> memory;
  memory.reserve(list.size());
  for (const py::handle& item : list) {
    const auto tuple = py::cast<py::tuple>(item);
    memory.push_back(
        {tuple[0].cast<size_t>(), tuple[1].cast<uint64_t>(), tuple[2].cast<uint64_t>()});
  }
  return memory;
}

StepReport ReadReport(const py::dict& dict, const std::string& groups_json) {
  StepReport report;
  for (const py::handle& item : dict["slots"].cast<py::list>()) {
    const auto tuple = py::cast<py::tuple>(item);
    report.slots.push_back({tuple[0].cast<double>(), tuple[1].cast<uint64_t>()});
  }
  for (const py::handle& item : dict["absent"].cast<py::list>()) {
    report.absent.push_back(item.cast<size_t>());
  }
  report.blob = dict["blob"].cast<std::string>();
  absl::StatusOr<JobOptions> groups = JobOptions::FromJson(groups_json, "param_groups");
  Raise(groups.status());
  report.groups = std::move(groups->groups);
  return report;
}

std::span<const float> Floats(uint64_t address, uint64_t elements) {
  return {reinterpret_cast<const float*>(address), elements};
}

absl::Status WrongSize(size_t parameter, uint64_t bytes, uint64_t expected) {
  return absl::InternalError(absl::StrCat("parameter ", parameter, " was handed over as ", bytes,
                                          " bytes; the job has ", expected));
}

absl::Status CopyWeights(Session* session, std::span<const Memory> fetch, size_t element_bytes) {
  for (const Memory& to : fetch) {
    const uint64_t bytes = session->parameter_elements(to.parameter) * element_bytes;
    if (bytes != to.bytes) return WrongSize(to.parameter, to.bytes, bytes);
    absl::StatusOr<const void*> weights = session->WaitWeights(to.parameter);
    if (!weights.ok()) return weights.status();
    std::memcpy(reinterpret_cast<void*>(to.address), *weights, bytes);
  }
  return absl::OkStatus();
}

// The first parameter whose memory differs from the job's weights; -1: none.
absl::StatusOr<int64_t> FindChanged(Session* session, std::span<const Memory> compare,
                                    size_t element_bytes) {
  for (const Memory& with : compare) {
    const uint64_t bytes = session->parameter_elements(with.parameter) * element_bytes;
    if (bytes != with.bytes) return WrongSize(with.parameter, with.bytes, bytes);
    absl::StatusOr<const void*> weights = session->WaitWeights(with.parameter);
    if (!weights.ok()) return weights.status();
    if (std::memcmp(reinterpret_cast<const void*>(with.address), *weights, bytes) != 0) {
      return static_cast<int64_t>(with.parameter);
    }
  }
  return -1;
}

void RunStep(Session* session, const StepReport& report, std::span<const Memory> compare,
             std::span<const Memory> fetch, size_t element_bytes, StepOutcome* outcome) {
  absl::StatusOr<int64_t> changed = FindChanged(session, compare, element_bytes);
  outcome->status = changed.status();
  if (!changed.ok()) return;
  outcome->changed = *changed;
  if (*changed >= 0) return;
  outcome->status = session->EndStep(report);
  if (!outcome->status.ok()) return;
  absl::StatusOr<Decision> decision = session->WaitDecision();
  outcome->status = decision.status();
  if (!decision.ok()) return;
  outcome->decision = *std::move(decision);
  if (outcome->decision.result == StepResult::kSkipped) return;  // the weights are what they were
  outcome->status = CopyWeights(session, fetch, element_bytes);
}

}  // namespace

SessionBinding::SessionBinding(const py::dict& options, const std::string& job,
                               const py::list& parameters, const py::list& frozen)
    : live_(std::make_shared<Live>()) {
  SessionOptions session_options = ReadOptions(options);
  // The queue's thread is joined before Live ends, or both are left behind.
  Live* live = live_.get();
  session_options.log = [live](const std::string& line) {
    live->spoke = true;
    std::lock_guard<std::mutex> lock(live->mutex);
    live->log.push_back(line);
  };
  absl::StatusOr<JobOptions> job_options = JobOptions::FromJson(job, "the job's options");
  Raise(job_options.status());
  job_options->frozen = ReadFrozen(frozen);
  live_->element_bytes = DTypeBytes(job_options->weight_dtype);
  auto specs = ReadParameters(parameters);
  auto status = std::make_shared<absl::Status>();
  const uint64_t verb =
      live_->queue.Add([live, status, session_options = std::move(session_options),
                        job_options = *std::move(job_options), specs = std::move(specs)] {
        absl::StatusOr<std::unique_ptr<Session>> session =
            Session::Open(session_options, job_options, specs);
        *status = session.status();
        if (session.ok()) live->session = *std::move(session);
      });
  try {
    Await(verb);
    Raise(*status);
  } catch (...) {
    LeaveBehind();
    throw;
  }
}

void SessionBinding::LeaveBehind() {
  // A forked child has neither the threads nor the right to this session. A verb that has not
  // ended may never end: the interpreter does not wait for it.
  if (getpid() != pid_ || !live_->queue.WaitDone(live_->queue.Add([] {}), kLook)) {
    new std::shared_ptr<Live>(std::move(live_));
    return;
  }
  py::gil_scoped_release release;
  live_ = nullptr;
}

SessionBinding::~SessionBinding() {
  if (live_ == nullptr) return;
  LeaveBehind();
}

SessionBinding::Live& SessionBinding::live() const {
  if (live_ == nullptr) {
    Raise(absl::FailedPreconditionError("this optimizer was closed; make a new one"));
  }
  if (getpid() != pid_) {
    Raise(absl::FailedPreconditionError(
        "this is a forked child: the optimizer belongs to its parent; use it there, or make one "
        "here"));
  }
  return *live_;
}

Session& SessionBinding::session() const { return *live().session; }

py::list SessionBinding::TakeLog() {
  py::list lines;
  std::lock_guard<std::mutex> lock(live().mutex);
  for (const std::string& line : live_->log) lines.append(line);
  live_->log.clear();
  return lines;
}

void SessionBinding::Await(uint64_t verb) {
  VerbQueue& queue = live().queue;
  while (true) {
    bool over = false;
    {
      py::gil_scoped_release release;
      over = queue.WaitDone(verb, kLook);
    }
    if (over) return;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (live_->spoke.exchange(false)) {
      py::module_::import("shardd.errors").attr("_say")(TakeLog());
    }
  }
}

void SessionBinding::Wait(uint64_t verb) { Await(verb); }

void SessionBinding::Run(std::function<absl::Status(Session*)> verb) {
  auto status = std::make_shared<absl::Status>();
  Live* live = &this->live();
  const uint64_t number = live->queue.Add(
      [live, status, verb = std::move(verb)] { *status = verb(live->session.get()); });
  Await(number);
  Raise(*status);
}

void SessionBinding::Upload(size_t parameter, uint64_t address, uint64_t elements) {
  Run([=](Session* session) { return session->Upload(parameter, 0, Floats(address, elements)); });
}

void SessionBinding::UploadMoment(uint32_t moment, size_t parameter, uint64_t address,
                                  uint64_t elements, uint64_t applied) {
  Run([=](Session* session) {
    return session->UploadMoment(moment, parameter, 0, Floats(address, elements), applied);
  });
}

void SessionBinding::UploadFrozen(size_t index, uint64_t address, uint64_t bytes) {
  Run([=](Session* session) {
    return session->UploadFrozen(index, 0, {reinterpret_cast<const std::byte*>(address), bytes});
  });
}

void SessionBinding::FinishUpload() {
  Run([](Session* session) { return session->FinishUpload(); });
}

uint64_t SessionBinding::SendGradient(size_t parameter, uint32_t slot, uint64_t address,
                                      uint64_t bytes) {
  Live* live = &this->live();
  return live->queue.Add([=] {
    {
      std::lock_guard<std::mutex> lock(live->mutex);
      if (!live->gradients.ok()) return;
    }
    absl::StatusOr<void*> buffer = live->session->AcquireGrad(parameter, slot);
    absl::Status status = buffer.status();
    if (status.ok()) {
      std::memcpy(*buffer, reinterpret_cast<const void*>(address), bytes);
      status = live->session->ReadyGrad(parameter, slot);
    }
    std::lock_guard<std::mutex> lock(live->mutex);
    live->gradients = std::move(status);
  });
}

bool SessionBinding::failed() const {
  Live& live = this->live();
  std::lock_guard<std::mutex> lock(live.mutex);
  return !live.gradients.ok();
}

void SessionBinding::CheckGradients() {
  Await(live().queue.Add([] {}));
  absl::Status status;
  {
    std::lock_guard<std::mutex> lock(live_->mutex);
    std::swap(status, live_->gradients);
  }
  Raise(status);
}

void SessionBinding::Rejoin() {
  Run([](Session* session) { return session->Rejoin(); });
}

py::object SessionBinding::EndStep(const py::dict& report, const py::list& compare,
                                   const py::list& fetch) {
  if (ending()) {
    Raise(absl::FailedPreconditionError(
        "a step that was ended before has not been seen to its end; call FinishStep"));
  }
  Live* live = &this->live();
  live->ending = std::make_shared<StepOutcome>();
  live->ending_verb =
      live->queue.Add([live, outcome = live->ending,
                       report = ReadReport(report, report["groups"].cast<std::string>()),
                       compare = ReadMemory(compare), fetch = ReadMemory(fetch)] {
        RunStep(live->session.get(), report, compare, fetch, live->element_bytes, outcome.get());
      });
  return FinishStep();
}

py::object SessionBinding::FinishStep() {
  if (!ending()) return py::none();
  Await(live_->ending_verb);
  const std::shared_ptr<StepOutcome> outcome = std::move(live_->ending);
  live_->ending = nullptr;
  Raise(outcome->status);
  if (outcome->changed >= 0) return py::int_(outcome->changed);
  return py::cast(outcome->decision);
}

void SessionBinding::Fetch(const py::list& fetch) {
  const size_t element_bytes = live().element_bytes;
  Run([memory = ReadMemory(fetch), element_bytes](Session* session) {
    return CopyWeights(session, memory, element_bytes);
  });
}

uint64_t SessionBinding::StartFetch(const py::list& fetch) {
  Live* live = &this->live();
  return live->queue.Add([live, memory = ReadMemory(fetch)] {
    absl::Status status = CopyWeights(live->session.get(), memory, live->element_bytes);
    std::lock_guard<std::mutex> lock(live->mutex);
    if (live->gradients.ok()) live->gradients = std::move(status);
  });
}

py::memoryview SessionBinding::Weights(size_t parameter) {
  auto weights = std::make_shared<const void*>(nullptr);
  Run([=](Session* session) {
    absl::StatusOr<const void*> got = session->WaitWeights(parameter);
    if (got.ok()) *weights = *got;
    return got.status();
  });
  const size_t bytes = session().parameter_elements(parameter) * live_->element_bytes;
  return py::memoryview::from_memory(const_cast<void*>(*weights), static_cast<ssize_t>(bytes));
}

uint64_t SessionBinding::Gather(std::vector<size_t> parameters) {
  Live* live = &this->live();
  return live->queue.Add([live, parameters = std::move(parameters)] {
    absl::Status status = live->session->Gather(parameters);
    std::lock_guard<std::mutex> lock(live->mutex);
    if (live->gradients.ok()) live->gradients = std::move(status);
  });
}

uint64_t SessionBinding::Release(std::vector<size_t> parameters) {
  Live* live = &this->live();
  return live->queue.Add([live, parameters = std::move(parameters)] {
    absl::Status status = live->session->Release(parameters);
    std::lock_guard<std::mutex> lock(live->mutex);
    if (live->gradients.ok()) live->gradients = std::move(status);
  });
}

void SessionBinding::ReadState(uint32_t kind, size_t parameter, uint64_t address,
                               uint64_t elements) {
  Run([=](Session* session) {
    return session->ReadState(static_cast<StateKind>(kind), parameter, 0,
                              {reinterpret_cast<float*>(address), elements});
  });
}

uint64_t SessionBinding::ParameterApplied(size_t parameter) {
  auto applied = std::make_shared<uint64_t>(0);
  Run([=](Session* session) {
    absl::StatusOr<uint64_t> got = session->ParameterApplied(parameter);
    if (got.ok()) *applied = *got;
    return got.status();
  });
  return *applied;
}

py::list SessionBinding::StepRecords(uint64_t first_step) {
  auto records = std::make_shared<std::vector<StepRecord>>();
  Run([=](Session* session) {
    absl::StatusOr<std::vector<StepRecord>> got = session->StepRecords(first_step);
    if (got.ok()) *records = *std::move(got);
    return got.status();
  });
  py::list list;
  for (StepRecord& record : *records) list.append(py::cast(std::move(record)));
  return list;
}

py::tuple SessionBinding::SaveCheckpoint(uint32_t keep, bool wait) {
  auto saved = std::make_shared<SavedCheckpoint>();
  Run([=](Session* session) {
    SaveOptions options;
    options.keep = keep;
    options.wait = wait;
    absl::StatusOr<SavedCheckpoint> got = session->SaveCheckpoint(options);
    if (got.ok()) *saved = *std::move(got);
    return got.status();
  });
  return py::make_tuple(saved->step, saved->path);
}

bool SessionBinding::Close(double seconds_if_gone) {
  auto status = std::make_shared<absl::Status>();
  Live* live = &this->live();
  live->spoke = false;
  const uint64_t verb = live->queue.Add([live, status] { *status = live->session->Close(); });
  absl::Time deadline = absl::InfiniteFuture();
  {
    py::gil_scoped_release release;
    // A session that says something while it closes looks for a daemon that is gone; one that does
    // something else still may wait for one.
    while (!live->queue.WaitDone(verb, kLook)) {
      if (deadline == absl::InfiniteFuture() && (live->queue.done() + 1 < verb || live->spoke)) {
        deadline = absl::Now() + absl::Seconds(seconds_if_gone);
      }
      if (absl::Now() >= deadline) return false;
    }
  }
  Raise(*status);
  return true;
}

void SessionBinding::DeleteJob() {
  Run([](Session* session) { return session->DeleteJob(); });
}

}  // namespace shardd::python
