// What tests/serving/client/test_cpp.py checks of tdp.hpp: one mode per run, one line of output.
#include <atomic>
#include <iostream>
#include <string>
#include <tdp.hpp>
#include <thread>

using Clock = std::chrono::steady_clock;

long since(Clock::time_point start) {
  return std::chrono::duration_cast<tdp::milliseconds>(Clock::now() - start).count();
}

// "CODE MS": with what error a plan ended, and how long after `start`.
std::string ended(tdp::Plan& plan, const Clock::time_point& start) {
  try {
    while (plan.next()) {
    }
  } catch (const tdp::Error& error) {
    return error.code + " " + std::to_string(since(start));
  }
  return "ok " + std::to_string(since(start));
}

std::string run(const std::string& mode, tdp::Client& client, const std::string& argument) {
  const tdp::json ask = {{"prompt", "x"}, {"stream", "steps"}};
  if (mode == "call") return client.call({{"op", argument}}).dump();
  if (mode == "long") return client.plan({{"prompt", std::string(1 << 20, 'x')}}).dump();
  if (mode == "plan") return client.plan(tdp::json::parse(argument)).dump();
  if (mode == "cancel") {
    tdp::Plan plan(client, ask);
    plan.next();
    Clock::time_point start;
    std::thread other([&] {
      std::this_thread::sleep_for(tdp::milliseconds(30));
      start = Clock::now();
      plan.cancel();
    });
    other.join();
    return ended(plan, start);
  }
  if (mode == "early") {  // a cancel before the first next, twice
    tdp::Plan plan(client, ask);
    plan.cancel();
    plan.cancel();
    return ended(plan, Clock::now());
  }
  if (mode == "leave") {  // a plan that is left is cancelled: the next one of its session is not busy
    { tdp::Plan plan(client, ask); plan.next(); }
    const auto start = Clock::now();
    while (client.call({{"op", "health"}})["running"] != 0 && since(start) < 2000) {
    }
    return "ok " + std::to_string(since(start));
  }
  if (mode == "threads") {
    std::atomic<int> whole{0};
    std::thread threads[4];
    for (auto& thread : threads)
      thread = std::thread([&] { whole += tdp::whole(client.plan({{"prompt", "x"}})); });
    for (auto& thread : threads) thread.join();
    return std::to_string(whole);
  }
  if (mode == "lost") {  // prints a line after the first step; then the test kills the server
    tdp::Plan plan(client, ask);
    plan.next();
    std::cout << "step" << std::endl;
    return ended(plan, Clock::now());
  }
  if (mode == "image") {  // 64 x 48 pixels, 8 bytes of padding at the end of a row; then a file that is none
    std::vector<std::uint8_t> pixels(200 * 48, 7);
    tdp::json sent = tdp::showing("x", {tdp::image("cam0", "rgb8", pixels, 64, 48, 200)});
    sent["deadline_ms"] = 5000;
    const tdp::json result = client.plan(sent);
    try {
      client.plan(tdp::showing("x", {tdp::image("cam0", "jpeg", {1, 2, 3})}));
    } catch (const tdp::Error& error) {
      return tdp::json({{"result", result}, {"field", error.reply["field"]}}).dump();
    }
  }
  if (mode == "format") {  // the leaves of a tree as they come, then the tree
    const tdp::json skills = tdp::json::parse(argument);
    tdp::Plan plan(client, {{"prompt", "x"}, {"stream", "steps"}, {"skills", skills}, {"plan_format", "bt_cpp_xml"}});
    tdp::json steps = tdp::json::array(), last;
    while (auto event = plan.next())
      if ((*event)["type"] == "chunk") steps.push_back((*event)["step"]);
      else last = (*event)["plan"];
    return tdp::json({{"steps", steps}, {"plan", last}}).dump();
  }
  return "unknown mode";
}

int main(int argc, char** argv) {
  tdp::Options options;
  options.timeout = tdp::milliseconds(1500);
  options.retries = 0;
  if (argc == 5) options.retries = std::stoi(argv[4]);
  if (argc == 7) {
    options.server_key = argv[4];
    options.public_key = argv[5];
    options.secret_key = argv[6];
  }
  tdp::Client client(argv[1], options);
  const auto start = Clock::now();
  try {
    std::cout << run(argv[2], client, argv[3]) << std::endl;
  } catch (const tdp::Error& error) {
    std::cout << error.code << " " << since(start) << " " << error.retryable << " " << error.reply.dump()
              << std::endl;
  }
}
