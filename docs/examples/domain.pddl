; What the skills of domain.yaml do, for a validator of PDDL plans. The planner itself reads only
; the skills.
(define (domain kitchen)
  (:requirements :strips :typing)
  (:types object location)
  (:predicates (holds ?o - object) (free) (on ?o - object ?p - location))
  (:action pick
    :parameters (?o - object)
    :precondition (free)
    :effect (and (holds ?o) (not (free))))
  (:action place
    :parameters (?o - object ?p - location)
    :precondition (holds ?o)
    :effect (and (on ?o ?p) (free) (not (holds ?o))))
  (:action wait
    :parameters ()
    :precondition (free)
    :effect (free)))
